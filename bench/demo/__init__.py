"""How the embedded model is made and measured: corpus, tokenizer, training, evaluation, figures on a CPU."""
