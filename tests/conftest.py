"""One thread for each test process: pytest runs several of them."""

import torch

torch.set_num_threads(1)
