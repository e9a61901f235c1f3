"""What `overlap` is made of: what must stay before what, what nodes cost, in which order they run."""
