"""The one place where hardware makes a difference: each kernel here picks its own path and every path agrees."""
