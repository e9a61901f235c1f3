"""Have the guards teeth? Faults planted mechanically in the row analysis, one at a time, and who notices each.

faults     what can be done to a source: a condition dropped, a number shifted, an argument left out
planting   doing it to the running process
forks      a process of its own for each fault
programs   generated programs, captured once; what a fault changes about them
suite      the tests, run inside of a process that is warm
table      what came of it, by module
"""
