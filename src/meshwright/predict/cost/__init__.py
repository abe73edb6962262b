"""What a step costs in time, every line of it by name.

`operators` lists what a rank computes, `roofline` gives each of it seconds, `links` the collectives; `parts` puts a
block together, `stage` a pipeline stage, and `step` simulates the schedule over them. All numbers that were fitted are
in `constants`, with their meaning and source.
"""
