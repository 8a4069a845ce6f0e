// SPDX-License-Identifier: GPL-2.0
/*
 * hostdrv: PCI drivers that stand for a host's own.
 *
 * They carry the names of the real drivers, match what those match, probe
 * successfully and do nothing.  None sets driver_managed_dma: like the real
 * ones they use the DMA API, so an IOMMU group is not viable for VFIO while
 * one of them is bound.  The test lab checks the way back from vfio-pci
 * against these names.
 *
 * The real drivers of the same names must not be loaded beside this module.
 */
#include <linux/module.h>
#include <linux/pci.h>

#define VENDOR_MELLANOX		0x15b3
#define CLASS_MASK_BASE		0xff0000	/* base class only */
#define CLASS_MASK_SUB		0xffff00	/* base and sub class */
#define CLASS_MASK_PROG		0xffffff	/* and programming interface */

static int hostdrv_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return 0;
}

/* One match row: a vendor (or PCI_ANY_ID) and a 24-bit class under a mask. */
#define MATCH(_vendor, _class, _mask)					\
	{ .vendor = (_vendor), .device = PCI_ANY_ID,			\
	  .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,		\
	  .class = (_class), .class_mask = (_mask) }

static const struct pci_device_id nvidia_ids[] = {
	MATCH(PCI_VENDOR_ID_NVIDIA, 0x030000, CLASS_MASK_BASE),	/* VGA, 3D */
	MATCH(PCI_VENDOR_ID_NVIDIA, 0x068000, CLASS_MASK_SUB),	/* NVSwitch */
	{ }
};

static const struct pci_device_id audio_ids[] = {
	MATCH(PCI_ANY_ID, 0x040300, CLASS_MASK_SUB),
	{ }
};

static const struct pci_device_id xhci_ids[] = {
	MATCH(PCI_ANY_ID, 0x0c0330, CLASS_MASK_PROG),
	{ }
};

static const struct pci_device_id ucsi_ids[] = {
	MATCH(PCI_VENDOR_ID_NVIDIA, 0x0c8000, CLASS_MASK_SUB),
	{ }
};

static const struct pci_device_id nic_ids[] = {
	MATCH(VENDOR_MELLANOX, 0x020000, CLASS_MASK_SUB),
	{ }
};

static struct pci_driver drivers[] = {
	{ .name = "nvidia",        .id_table = nvidia_ids, .probe = hostdrv_probe },
	{ .name = "snd_hda_intel", .id_table = audio_ids,  .probe = hostdrv_probe },
	{ .name = "xhci_hcd",      .id_table = xhci_ids,   .probe = hostdrv_probe },
	{ .name = "nvidia-gpu",    .id_table = ucsi_ids,   .probe = hostdrv_probe },
	{ .name = "mlx5_core",     .id_table = nic_ids,    .probe = hostdrv_probe },
};

static void hostdrv_unregister(int count)
{
	while (count--)
		pci_unregister_driver(&drivers[count]);
}

static int __init hostdrv_init(void)
{
	int i, ret;

	for (i = 0; i < ARRAY_SIZE(drivers); i++) {
		ret = pci_register_driver(&drivers[i]);
		if (ret) {
			pr_err("hostdrv: registering %s failed: %d\n",
			       drivers[i].name, ret);
			hostdrv_unregister(i);
			return ret;
		}
	}
	return 0;
}

static void __exit hostdrv_exit(void)
{
	hostdrv_unregister(ARRAY_SIZE(drivers));
}

module_init(hostdrv_init);
module_exit(hostdrv_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("PCI drivers that stand for a host's own in vfiod's test lab");
