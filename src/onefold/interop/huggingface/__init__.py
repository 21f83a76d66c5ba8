"""The room of Hugging Face's formats: `export`, `full_state_dict`, `load_pretrained`.

Owns names and files as transformers has them. Imports `setup`, `files` and below; `checkpoint` imports nothing of it.
"""
