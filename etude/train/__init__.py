"""Training: one trainer, small objectives, and the stages that feed them."""
