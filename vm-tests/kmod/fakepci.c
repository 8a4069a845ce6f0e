// SPDX-License-Identifier: GPL-2.0
/*
 * fakepci: PCI functions that exist only as configuration space in memory.
 *
 * The config accessors of a real (QEMU) root port's secondary bus are replaced
 * by ours.  Everything above them (enumeration, resources, sysfs, IOMMU groups,
 * reset, vfio-pci) stays the kernel's own code.  The functions must hang below
 * a real port: a host bridge of our own would not be in the scope of any IOMMU
 * and its devices would get no group.
 *
 *   insmod fakepci.ko functions=SPEC[,SPEC...]
 *   SPEC = PORT/FN/VENDOR:DEVICE/CLASS/BAR0/BAR1/BAR3
 *     PORT    dddd:bb:dd.f of the root port; its slot 0 gets the function
 *     FN      function number 0-7; several SPECs of one PORT share the slot,
 *             hence (no ACS between them) the IOMMU group
 *     VENDOR, DEVICE, CLASS   hex, CLASS with 24 bits
 *     BARx    size in MiB, decimal, a power of two, 0 for none.  BAR0 is 32 bit,
 *             BAR1 and BAR3 are 64 bit and prefetchable as on NVIDIA's cards
 *
 * The BARs get addresses in the port's windows, but nothing answers there.
 *
 * Locking: the PCI core calls config accessors under its pci_lock, so accesses
 * to a configuration space are serialised by it.  The tables here are complete
 * before the accessors are put in place and change only after they are gone.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/log2.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#define MAX_FUNCTIONS	64

/* Where our capabilities lie in configuration space. */
#define PM_POS		0x60
#define MSI_POS		0x68
#define EXP_POS		0x78
#define EXP_END		0xb4
#define DSN_POS		0x100

struct config {
	u8 value[PCI_CFG_SPACE_EXP_SIZE];
	u8 writable[PCI_CFG_SPACE_EXP_SIZE];	/* bits that a write changes */
};

struct function {
	struct pci_bus *bus;
	unsigned int devfn;
	struct config *config;
};

struct port {
	struct pci_dev *dev;		/* with a reference held */
	struct pci_bus *bus;		/* its secondary bus */
	struct pci_ops *original;	/* NULL until ours are in place */
};

static struct function functions[MAX_FUNCTIONS];
static unsigned int nr_functions;
static struct port ports[MAX_FUNCTIONS];
static unsigned int nr_ports;

static char *specs[MAX_FUNCTIONS];
static unsigned int nr_specs;
module_param_array_named(functions, specs, charp, &nr_specs, 0444);
MODULE_PARM_DESC(functions, "PORT/FN/VENDOR:DEVICE/CLASS/BAR0/BAR1/BAR3, ...");

/* Config accessors */

static struct config *find_config(struct pci_bus *bus, unsigned int devfn)
{
	unsigned int i;

	for (i = 0; i < nr_functions; i++)
		if (functions[i].bus == bus && functions[i].devfn == devfn)
			return functions[i].config;
	return NULL;
}

static int fakepci_read(struct pci_bus *bus, unsigned int devfn, int where,
			int size, u32 *val)
{
	struct config *config = find_config(bus, devfn);
	int i;

	*val = ~0u;	/* what a bus without a device answers */
	if (!config)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where < 0 || where + size > sizeof(config->value))
		return PCIBIOS_BAD_REGISTER_NUMBER;
	*val = 0;
	for (i = 0; i < size; i++)
		*val |= (u32)config->value[where + i] << (8 * i);
	return PCIBIOS_SUCCESSFUL;
}

static int fakepci_write(struct pci_bus *bus, unsigned int devfn, int where,
			 int size, u32 val)
{
	struct config *config = find_config(bus, devfn);
	int i;

	if (!config)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where < 0 || where + size > sizeof(config->value))
		return PCIBIOS_BAD_REGISTER_NUMBER;
	for (i = 0; i < size; i++) {
		u8 *byte = &config->value[where + i];
		u8 mask = config->writable[where + i];

		*byte = (*byte & ~mask) | ((val >> (8 * i)) & mask);
	}
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops fakepci_ops = {
	.read = fakepci_read,
	.write = fakepci_write,
};

/* Building a configuration space */

static void put16(u8 *space, unsigned int pos, u16 val)
{
	space[pos] = val;
	space[pos + 1] = val >> 8;
}

static void put32(u8 *space, unsigned int pos, u32 val)
{
	put16(space, pos, val);
	put16(space, pos + 2, val >> 16);
}

static void put_bar(struct config *c, unsigned int pos, unsigned int mib, bool wide)
{
	u64 mask = ~(((u64)mib << 20) - 1);

	if (!mib)
		return;
	put32(c->writable, pos, (u32)mask & (u32)PCI_BASE_ADDRESS_MEM_MASK);
	if (wide) {
		put32(c->value, pos, PCI_BASE_ADDRESS_MEM_TYPE_64 |
				     PCI_BASE_ADDRESS_MEM_PREFETCH);
		put32(c->writable, pos + 4, mask >> 32);
	}
}

static void put_capabilities(struct config *c, u16 device, unsigned int fn)
{
	u8 *v = c->value, *w = c->writable;

	v[PCI_CAPABILITY_LIST] = PM_POS;

	v[PM_POS] = PCI_CAP_ID_PM;
	v[PM_POS + PCI_CAP_LIST_NEXT] = MSI_POS;
	put16(v, PM_POS + PCI_PM_PMC, 3);		/* version 1.2, no PME */
	put16(v, PM_POS + PCI_PM_CTRL, PCI_PM_CTRL_NO_SOFT_RESET);
	put16(w, PM_POS + PCI_PM_CTRL, PCI_PM_CTRL_STATE_MASK);

	v[MSI_POS] = PCI_CAP_ID_MSI;
	v[MSI_POS + PCI_CAP_LIST_NEXT] = EXP_POS;
	put16(v, MSI_POS + PCI_MSI_FLAGS, PCI_MSI_FLAGS_64BIT);
	put16(w, MSI_POS + PCI_MSI_FLAGS, PCI_MSI_FLAGS_ENABLE);
	put32(w, MSI_POS + PCI_MSI_ADDRESS_LO, ~3u);
	put32(w, MSI_POS + PCI_MSI_ADDRESS_HI, ~0u);
	put16(w, MSI_POS + PCI_MSI_DATA_64, 0xffff);

	/*
	 * An endpoint of version 2 that can be reset by FLR.  The FLR bit itself
	 * is not kept (it reads as zero) and no transaction is ever pending.
	 */
	v[EXP_POS] = PCI_CAP_ID_EXP;
	put16(v, EXP_POS + PCI_EXP_FLAGS, 2 | PCI_EXP_TYPE_ENDPOINT << 4);
	put32(v, EXP_POS + PCI_EXP_DEVCAP, PCI_EXP_DEVCAP_FLR | PCI_EXP_DEVCAP_RBER | 1);
	put16(w, EXP_POS + PCI_EXP_DEVCTL, 0x7fff);
	put32(v, EXP_POS + PCI_EXP_LNKCAP, PCI_EXP_LNKCAP_SLS_8_0GB | 16 << 4);
	put16(v, EXP_POS + PCI_EXP_LNKSTA, PCI_EXP_LNKSTA_CLS_8_0GB | 16 << 4);
	put16(w, EXP_POS + PCI_EXP_LNKCTL, 0x0fff);

	/* One extended capability, so that the space above 256 bytes counts. */
	put32(v, DSN_POS, PCI_EXT_CAP_ID_DSN | 1 << 16);
	put32(v, DSN_POS + 4, 0xb02d0000 | device);
	put32(v, DSN_POS + 8, 0x11220048 + fn);
}

static void fill_config(struct config *c, unsigned int fn, u16 vendor, u16 device,
			u32 class, const unsigned int bar[3])
{
	u8 *v = c->value, *w = c->writable;

	put16(v, PCI_VENDOR_ID, vendor);
	put16(v, PCI_DEVICE_ID, device);
	put16(w, PCI_COMMAND, PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER |
			      PCI_COMMAND_PARITY | PCI_COMMAND_SERR |
			      PCI_COMMAND_INTX_DISABLE);
	put16(v, PCI_STATUS, PCI_STATUS_CAP_LIST);
	put32(v, PCI_CLASS_REVISION, class << 8 | 0xa1);
	/* Harmless on a single function: the kernel then asks 1-7 in vain. */
	v[PCI_HEADER_TYPE] = 0x80;
	w[PCI_CACHE_LINE_SIZE] = 0xff;
	w[PCI_INTERRUPT_LINE] = 0xff;
	put16(v, PCI_SUBSYSTEM_VENDOR_ID, vendor);
	put16(v, PCI_SUBSYSTEM_ID, device);
	put_bar(c, PCI_BASE_ADDRESS_0, bar[0], false);
	put_bar(c, PCI_BASE_ADDRESS_1, bar[1], true);
	put_bar(c, PCI_BASE_ADDRESS_3, bar[2], true);
	put_capabilities(c, device, fn);
}

/* Setting up and taking down */

static struct port *get_port(unsigned int domain, unsigned int bus,
			     unsigned int dev, unsigned int fn)
{
	struct pci_dev *pdev;
	unsigned int i;

	pdev = pci_get_domain_bus_and_slot(domain, bus, PCI_DEVFN(dev, fn));
	if (!pdev)
		return ERR_PTR(-ENODEV);
	for (i = 0; i < nr_ports; i++) {
		if (ports[i].dev == pdev) {
			pci_dev_put(pdev);	/* held by the entry already */
			return &ports[i];
		}
	}
	if (!pdev->subordinate) {
		pci_dev_put(pdev);
		return ERR_PTR(-ENOTDIR);
	}
	ports[nr_ports].dev = pdev;
	ports[nr_ports].bus = pdev->subordinate;
	return &ports[nr_ports++];
}

static bool valid_bar(unsigned int mib, unsigned int max)
{
	return !mib || (is_power_of_2(mib) && mib <= max);
}

static int add_function(const char *spec)
{
	unsigned int domain, bus, dev, pfn, fn, vendor, device, class, bar[3];
	struct config *config;
	struct port *port;
	char end;

	/* The last conversion only matches when something follows the spec. */
	if (sscanf(spec, "%x:%x:%x.%u/%u/%x:%x/%x/%u/%u/%u%c", &domain, &bus, &dev,
		   &pfn, &fn, &vendor, &device, &class, &bar[0], &bar[1], &bar[2],
		   &end) != 11 ||
	    bus > 0xff || dev > 31 || pfn > 7 || fn > 7 || vendor > 0xffff ||
	    device > 0xffff || class > 0xffffff || !valid_bar(bar[0], 2048) ||
	    !valid_bar(bar[1], 1 << 20) || !valid_bar(bar[2], 1 << 20)) {
		pr_err("'%s' is not PORT/FN/VENDOR:DEVICE/CLASS/BAR0/BAR1/BAR3\n", spec);
		return -EINVAL;
	}
	port = get_port(domain, bus, dev, pfn);
	if (IS_ERR(port)) {
		pr_err("'%s': no such bridge\n", spec);
		return PTR_ERR(port);
	}
	if (find_config(port->bus, PCI_DEVFN(0, fn))) {
		pr_err("'%s': that function is taken\n", spec);
		return -EEXIST;
	}
	config = kzalloc(sizeof(*config), GFP_KERNEL);
	if (!config)
		return -ENOMEM;
	fill_config(config, fn, vendor, device, class, bar);
	functions[nr_functions].bus = port->bus;
	functions[nr_functions].devfn = PCI_DEVFN(0, fn);
	functions[nr_functions].config = config;
	nr_functions++;
	return 0;
}

static void free_tables(void)
{
	while (nr_functions)
		kfree(functions[--nr_functions].config);
	while (nr_ports)
		pci_dev_put(ports[--nr_ports].dev);
}

static int __init fakepci_init(void)
{
	unsigned int i;
	int ret;

	for (i = 0; i < nr_specs; i++) {
		ret = add_function(specs[i]);
		if (ret) {
			free_tables();
			return ret;
		}
	}
	pci_lock_rescan_remove();
	for (i = 0; i < nr_ports; i++) {
		ports[i].original = pci_bus_set_ops(ports[i].bus, &fakepci_ops);
		pci_rescan_bus(ports[i].bus);
	}
	pci_unlock_rescan_remove();
	return 0;
}

static void __exit fakepci_exit(void)
{
	struct pci_dev *pdev, *next;
	unsigned int i;

	pci_lock_rescan_remove();
	for (i = 0; i < nr_ports; i++) {
		list_for_each_entry_safe_reverse(pdev, next, &ports[i].bus->devices,
						 bus_list)
			pci_stop_and_remove_bus_device(pdev);
		pci_bus_set_ops(ports[i].bus, ports[i].original);
	}
	pci_unlock_rescan_remove();
	free_tables();
}

module_init(fakepci_init);
module_exit(fakepci_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("PCI functions in memory below a real root port, for vfiod's test lab");
