"""Models, sampling, block memory and the step. torch is imported here and nowhere else."""
