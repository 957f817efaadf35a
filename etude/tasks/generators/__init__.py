"""Tasks made out of real Python repositories with tests, without a language model: generators, and what proves them."""
