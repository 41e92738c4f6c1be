"""What is done to a rollout policy: quantization of weights, activations and KV cache, noise, staleness.

Works on any Hugging Face causal language model, in place and without a second copy of its weights.
"""
