"""Which PCI functions are GPUs and RDMA NICs, by the numbers that they carry. Shared by all ways of discovery. Pure."""

from __future__ import annotations

_NVIDIA = 0x10DE
_MELLANOX = 0x15B3
_AMAZON = 0x1D0F
_DISPLAY = 0x03  # the upper byte of a PCI class
_NETWORK = 0x02
_INFINIBAND = 0x0C06

_NAMES = {
    (_MELLANOX, 0x1013): "ConnectX-4",
    (_MELLANOX, 0x1015): "ConnectX-4 Lx",
    (_MELLANOX, 0x1017): "ConnectX-5",
    (_MELLANOX, 0x1019): "ConnectX-5 Ex",
    (_MELLANOX, 0x101B): "ConnectX-6",
    (_MELLANOX, 0x101D): "ConnectX-6 Dx",
    (_MELLANOX, 0x101E): "ConnectX virtual function",
    (_MELLANOX, 0x101F): "ConnectX-6 Lx",
    (_MELLANOX, 0x1021): "ConnectX-7",
    (_MELLANOX, 0x1023): "ConnectX-8",
    (_MELLANOX, 0xA2D6): "BlueField-2",
    (_MELLANOX, 0xA2DC): "BlueField-3",
    (_AMAZON, 0xEFA0): "EFA 1",
    (_AMAZON, 0xEFA1): "EFA 2",
    (_AMAZON, 0xEFA2): "EFA 3",
    (_AMAZON, 0xEFA3): "EFA 4",
}


def model_of(vendor: int, device: int) -> str:
    """As in "15b3:1021"."""
    return f"{vendor:04x}:{device:04x}"


def product_of(model: str) -> str | None:
    """The name under which a model is sold, for those that this package knows."""
    vendor, _, device = model.partition(":")
    try:
        return _NAMES.get((int(vendor, 16), int(device, 16)))
    except ValueError:
        return None


def is_gpu(pci_class: int, vendor: int) -> bool:
    """An NVIDIA display or 3D controller. `pci_class` has 16 bits."""
    return vendor == _NVIDIA and pci_class >> 8 == _DISPLAY


def is_network(pci_class: int) -> bool:
    """Any network controller."""
    return pci_class >> 8 == _NETWORK or pci_class == _INFINIBAND


def speaks_rdma(pci_class: int, vendor: int, device: int) -> bool:
    """A model that has an RDMA device whenever its driver runs and nothing hides it."""
    if not is_network(pci_class):
        return False
    return vendor == _MELLANOX or (vendor == _AMAZON and device & 0xFFF0 == 0xEFA0)


def why_hidden(vendor: int) -> str:
    """Why such a NIC may show no RDMA device, and what to do."""
    driver = "efa" if vendor == _AMAZON else "mlx5_ib"
    return (
        f"no RDMA device belongs to it: its driver ({driver}) is not loaded, or the container was started without it "
        "(/dev/infiniband)"
    )
