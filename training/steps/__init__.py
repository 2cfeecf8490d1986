"""Steps, evaluations and sample generations, on whole models and on pipelines."""
