"""Model families, one file each; `models.family` says what they say."""
