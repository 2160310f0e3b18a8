"""Lightning's own BoringModel, without checkpoints."""

import os

import lightning
from lightning.pytorch.demos.boring_classes import BoringModel

lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(BoringModel())
