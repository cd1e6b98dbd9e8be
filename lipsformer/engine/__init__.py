"""Training and evaluation of image models; the only part of the library that knows Accelerate."""
