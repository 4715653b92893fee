"""Trainers: each folder is one, and exposes `TRAINER`, an `engines.trainer.Trainer`."""
