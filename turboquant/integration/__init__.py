"""vLLM integration; the only part of the package that imports vLLM."""
