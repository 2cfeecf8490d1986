"""`import expertmesh`: a model with its optimizer, and the mix-in for Trainers."""
