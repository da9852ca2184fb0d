"""What a question over a stored document costs, here, with transformers and with llama.cpp's server, in one run."""
