"""Mixture-of-experts layers as plain maths: transformers' models of any family, with dropless experts in them."""
