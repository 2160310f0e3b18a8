"""The programs that measure. They run in processes of their own, since they import torch."""
