"""Generators: each folder or file is one, and exposes `GENERATOR`, an `engines.generator.GenerationEngine`."""
