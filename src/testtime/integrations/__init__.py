"""Adapters in other libraries, a file each; a library is imported only with its file.

metrics.py   metrics of torchmetrics before and after adaptation
callback.py  a callback of Lightning that adapts during `Trainer.test`
board.py     streams and runs in TensorBoard
hub.py       networks as models of the Hugging Face Hub, saved and loaded without a network connection
export.py    an adapted network as an ONNX file
"""
