"""What a training job would do on up to 1024 devices: a discrete-event simulation. Simulated, never measured.

turbogr simulate --devices 8,64,1024 --html scaling.html
"""
