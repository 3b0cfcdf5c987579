"""Request bytes to token ids: routing fields, chat template, tokenizer."""
