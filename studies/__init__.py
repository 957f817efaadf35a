"""The choices of the algorithm, each put to the test on a laptop: one command, one plot, the numbers beside it."""
