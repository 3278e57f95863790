"""What is tested: pins of transformers, the environments that they run in, and upstream's git."""
