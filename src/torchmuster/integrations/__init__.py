"""What a rank records about a script that torchmuster did not write: steps, losses and checkpoints.

Nothing here imports torch or a training library before the script does, so ``muster run`` costs no start-up time.
"""
