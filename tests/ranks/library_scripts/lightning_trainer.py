"""Lightning's Trainer."""

import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    log_every_n_steps=4,
    logger=False,
    default_root_dir="out",
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), loader, loader)
