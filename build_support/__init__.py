"""Build code in addition to setuptools: kernel embedding, the macOS cross build and its checks."""
