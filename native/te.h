/* te.h: the whole ABI between the C++ core and everything above it.
 *
 * Rules of this boundary: opaque handles and fixed-width integers; a call that can fail returns a te_status (or a null
 * pointer) and fills the te_error it was given; outputs come last and are set only on success. Every call may be made
 * from any thread and none takes the Python GIL. Nothing here aborts, exits or throws. Times are nanoseconds; a
 * timeout below zero means the engine's default (for te_transfer_wait: until the transfer ends, since it has a deadline of
 * its own), zero means "do not wait".
 *
 * The part between the two CDEF marks is plain C without macros: cffi reads it as it stands. */
#ifndef TE_H_
#define TE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* BEGIN CDEF */

enum {
  TE_ABI_VERSION = 5,
  TE_MAX_NICS = 16,
  TE_NIC_ADDRESS_BYTES = 96,  /* the longest provider address that is carried */
  TE_ADDRESS_BYTES = 2048,    /* an upper bound of an encoded address */
  TE_DESCRIPTOR_BYTES = 4096, /* an upper bound of an encoded region or counter descriptor */
  TE_MESSAGE_BYTES = 320,     /* length of te_error.message, terminator included */
  TE_NAME_BYTES = 64
};

typedef enum te_status {
  TE_OK = 0,
  TE_AGAIN = 1,                      /* nothing is wrong: not finished yet, or nothing there */
  TE_ERR_ARGUMENT = -1,              /* a value that can never work (lengths that differ, an unknown enumerator) */
  TE_ERR_RANGE = -2,                 /* an offset or index outside its region, 64-bit overflow included */
  TE_ERR_CONFIG = -3,                /* a setting that cannot be honoured here */
  TE_ERR_TRANSPORT_UNAVAILABLE = -4, /* library, provider or device missing; message says which */
  TE_ERR_REGISTRATION = -5,
  TE_ERR_PEER_UNREACHABLE = -6,
  TE_ERR_PEER_LOST = -7,
  TE_ERR_PEER_RESTARTED = -8,
  TE_ERR_REMOTE_ACCESS = -9,
  TE_ERR_REGION_CLOSED = -10,
  TE_ERR_TIMEOUT = -11,
  TE_ERR_CANCELLED = -12,
  TE_ERR_TRANSPORT = -13,
  TE_ERR_CLOSED = -14,     /* the engine (or counter) was closed */
  TE_ERR_FORKED = -15,     /* the handle belongs to the parent of this process */
  TE_ERR_EXHAUSTED = -16,  /* a fixed table is full: ids, regions, peers, slots */
  TE_ERR_DESCRIPTOR = -17, /* foreign, truncated or damaged bytes */
  TE_ERR_STALE = -18 /* a remote handle that was given up: ask for it again (te_remote_region, te_remote_counter) */
} te_status;

typedef struct te_engine te_engine;
typedef uint64_t
    te_handle; /* of a region, counter, remote region, remote counter, target, prepared transfer, flag, watcher, binding or trigger; never given out twice by an engine */
typedef struct te_transfer
    te_transfer; /* the outcome of one operation; owned by the caller until te_transfer_release */

/* Added to what a device reports of a work request, which is no errno. */
enum {
  TE_STATUS_VERBS = 0x10000, /* ibv_wc_status */
  TE_STATUS_EFA = 0x20000    /* EFA's efa_io_comp_status */
};

typedef struct te_error {
  int32_t status;          /* te_status */
  int32_t nic;             /* index of the local NIC, -1 when none is involved */
  int32_t provider_status; /* an errno, or one of TE_STATUS_* and the number there; 0 when none */
  int32_t peer;            /* peer index, -1 when none */
  int64_t elapsed_ns;      /* since the operation was submitted, 0 when it never was */
  char message[320];       /* what and where, with the values; always terminated */
} te_error;

enum { TE_POLL_AUTO = 0, TE_POLL_BUSY = 1, TE_POLL_ADAPTIVE = 2 };
enum { TE_PAGES_AUTO = 0, TE_PAGES_EACH = 1, TE_PAGES_LAST = 2 };
enum { TE_CORE_AUTO = -1, TE_CORE_NONE = -2 };
enum { TE_GDR_AUTO = 0, TE_GDR_OFF = 1, TE_GDR_REQUIRE = 2 };

/* How cx7 uses RDMA ports. Numbers are those of the InfiniBand architecture. */
typedef struct te_rdma_settings {
  int32_t gid_index;      /* of every port; -1: by rule, see cx7/ports.h */
  uint32_t pkey_index;    /* index into the port's table of partition keys */
  uint32_t path_mtu;      /* bytes: 256, 512, 1024, 2048 or 4096; 0: the port's */
  uint32_t service_level; /* 0 to 15 */
  uint32_t traffic_class; /* 0 to 255; on RoCEv2 the DSCP in the upper six bits */
  uint32_t ack_timeout;   /* a lost packet is sent again after 4.096 us * 2^n to four times that; 1 to 31 */
  uint32_t retry_count;   /* how often, before the peer counts as gone; 0 to 7 */
  uint32_t rnr_retry;     /* how often when the peer has no receive posted; 7: for ever */
  uint32_t rnr_timer;     /* code of the wait that we ask for then; 0 to 31, 12 is 0.64 ms */
} te_rdma_settings;

/* Zero (or NULL) in a field that says so means "choose". te_settings_defaults fills all of it. */
typedef struct te_settings {
  uint32_t struct_bytes;      /* sizeof(te_settings) of the caller; checked */
  uint32_t nic_count;         /* 0: as many as `nics` names, else the transport's choice */
  const char *transport;      /* "sim" | "tcp" | "shm" | "efa" | "cx7" */
  const char *nics;           /* comma-separated interface names, addresses or device names; NULL or "": choose */
  const char *sim;            /* options of the simulated fabric, "key=value,..."; NULL: none */
  uint8_t identity[16];       /* all zero: random */
  int64_t default_timeout_ns; /* deadline of a transfer that names none */
  int64_t connect_timeout_ns; /* until PEER_UNREACHABLE */
  int64_t peer_timeout_ns;    /* silence after which a peer is lost */
  int64_t close_timeout_ns;
  int64_t spin_ns;              /* adaptive polling: spin this long before sleeping */
  uint32_t polling;             /* TE_POLL_* */
  int32_t core;                 /* CPU of the worker thread, or TE_CORE_* */
  uint32_t operations;          /* slots of the operation slab (power of two) */
  uint32_t operations_per_peer; /* cap of submitted, unfinished operations towards one peer */
  uint32_t nic_depth;           /* work requests in flight per NIC; 0: the provider's */
  uint32_t peer_depth;          /* work requests in flight per NIC and peer; 0: nic_depth */
  uint32_t immediate_window;    /* immediates in flight that this engine grants to each peer and NIC */
  uint32_t assembly_slots;      /* slots granted to each peer for writes cut over NICs */
  uint32_t message_window;      /* control and message fragments in flight per peer */
  uint32_t max_message_bytes;   /* longest message accepted by send */
  uint64_t message_queue_bytes; /* unreceived message bytes granted to each peer */
  uint64_t chunk_bytes;         /* longest single write posted; 0: the provider's */
  uint64_t shard_bytes;         /* a write is cut over k NICs when each part has at least this much */
  uint32_t page_immediates;     /* TE_PAGES_* */
  uint32_t max_peers;
  uint32_t max_regions; /* local regions, and as many remote ones */
  uint32_t max_counters;
  uint16_t port_low, port_high; /* listening ports to use; 0, 0: any */
  uint32_t bursts;              /* work requests posted towards one peer before others get their turn */
  uint64_t peer_window_bytes;   /* in flight per NIC and peer; one work request may reach over it */
  uint64_t nic_window_bytes;    /* in flight per NIC */
  te_rdma_settings rdma;
  uint32_t staging_slots;      /* pinned slots for each direction; allocated with the first staged region */
  uint32_t staging_slot_bytes; /* length of one: the longest piece of a staged transfer */
  uint32_t gdr;                /* TE_GDR_*: words in GPU memory that the CPU writes through GDRCopy */
} te_settings;

typedef struct te_nic_address {
  uint32_t length;
  uint8_t bytes[96];
} te_nic_address;

typedef struct te_address {
  uint8_t identity[16];
  uint64_t generation;
  uint32_t nic_count;
  char transport[16];
  te_nic_address nics[16];
} te_address;

typedef struct te_region_descriptor {
  te_address address;  /* of the engine that owns the region */
  uint64_t serial;     /* never reused by that engine */
  uint64_t length;     /* bytes */
  int32_t device_kind; /* TE_DEVICE_* */
  int32_t device_index;
  uint64_t base[16]; /* per NIC: the address that offset 0 has on the wire */
  uint64_t key[16];  /* per NIC: the remote key */
} te_region_descriptor;

typedef struct te_counter_descriptor {
  te_address address;
  uint64_t serial;
} te_counter_descriptor;

enum { TE_DEVICE_HOST = 0, TE_DEVICE_CUDA = 1 };

/* How the NICs get at a region. */
enum {
  TE_REACH_HOST = 0,        /* host memory */
  TE_REACH_DMABUF = 1,      /* GPU memory, through a dma-buf */
  TE_REACH_PEER_MEMORY = 2, /* GPU memory by its address, which needs nvidia-peermem or its like */
  TE_REACH_STAGED = 3       /* not at all: through pinned slots, see te_region_register_staged */
};

typedef struct te_region_info {
  uint64_t length;
  int32_t device_kind, device_index;
  uint32_t reach; /* TE_REACH_* */
  uint32_t reserved;
} te_region_info;

typedef struct te_engine_info {
  uint8_t identity[16];
  uint64_t generation;
  uint32_t nic_count;
  uint32_t polling;           /* TE_POLL_BUSY or TE_POLL_ADAPTIVE: what was chosen */
  int32_t core;               /* CPU of the worker, -1 when it is not pinned */
  uint32_t delivery_complete; /* 1: completion of a write proves that it was placed */
  uint32_t ordered_writes;    /* 1: a notification comes after all bytes that its NIC was given before it */
  uint32_t keys_enforced;     /* 1: the network refuses a stale key */
  uint32_t max_message_fragment;
  uint32_t wait_fd;         /* 1: the transport can sleep */
  uint64_t max_write_bytes; /* longest single work request */
  char transport[64];
  char provider[64]; /* e.g. "net", "tcp;ofi_rxm", "shm" */
  char library[64];  /* e.g. "libfabric 1.17.0" */
} te_engine_info;

typedef struct te_nic_info {
  char name[64];
  te_nic_address address;
  uint32_t up;
  char state[64]; /* in words, where there is more to say than `up`: "port down" */
  uint32_t depth; /* work requests that may be in flight */
  uint32_t in_flight;
  uint64_t bytes_in_flight;
  uint64_t writes, write_bytes, sends, receives, immediates, reads, errors, busy; /* busy: posts refused for now */
  uint32_t relaxed_ordering; /* 1: memory is registered so that bytes of a write may pass each other on PCIe */
  char ordering_reason[64];  /* if not: why */
} te_nic_info;

enum { TE_PEER_IDLE = 0, TE_PEER_CONNECTING = 1, TE_PEER_CONNECTED = 2, TE_PEER_LOST = 3, TE_PEER_CLOSED = 4 };

typedef struct te_peer_info {
  te_address address;
  uint32_t state;      /* TE_PEER_* */
  uint32_t operations; /* submitted and unfinished */
  uint32_t in_flight;  /* work requests */
  uint64_t bytes_in_flight;
  uint32_t immediates_in_flight; /* sent over any NIC and, as far as the peer has said, not polled there */
  uint32_t immediate_window;     /* that the peer grants for each of its NICs */
  uint64_t writes, write_bytes, messages_sent, messages_received, immediates_received, errors;
  int64_t silence_ns; /* since the last sign of life */
} te_peer_info;

typedef struct te_stats {
  uint64_t submitted, completed, failed, polls, sleeps, wakeups;
  uint64_t stray_messages, stray_immediates, damaged_messages;
  uint32_t operations_in_use, transfers_alive, regions, remote_regions, counters, peers;
} te_stats;

enum {
  TE_EVENT_TRANSFER = 1,  /* `transfer`, for which te_transfer_notify was called, has ended */
  TE_EVENT_PEER_LOST = 2, /* `peer` */
  TE_EVENT_MESSAGE = 3,   /* at least one message waits */
  TE_EVENT_WATCHER = 4    /* the watcher `user` has changed since te_watcher_take */
};

typedef struct te_event {
  uint32_t kind;
  int32_t peer;
  uint64_t user; /* of te_transfer_notify; TE_EVENT_WATCHER: the watcher */
  te_transfer *transfer;
} te_event;

typedef struct te_message {
  int32_t peer; /* the sender's index: te_peer_info gives its address */
  uint64_t length;
  const uint8_t *data; /* valid until te_message_release */
  void *owner;
} te_message;

enum { TE_NONE = 0xFFFFFFFFu }; /* "no counter" */
enum { TE_FLAG_FLUSH = 1 };     /* a read behind the write, on the same queue, before it counts as done */

/* One contiguous write. Handles: region from te_region_register, remote from te_remote_region, counter from te_remote_counter. */
typedef struct te_write_args {
  te_handle region, remote, counter;
  uint32_t flags;
  uint64_t source_offset, target_offset, length;
} te_write_args;

/* Page i is page_bytes long, from source_offset + source[i] * source_stride to target_offset + target[i] * target_stride.
 * index_bytes is 4 (int32) or 8 (int64). The arrays are read during the call only. */
typedef struct te_page_args {
  te_handle region, remote, counter;
  uint32_t flags;
  uint64_t source_offset, target_offset, source_stride, target_stride, page_bytes, count;
  const void *source, *target;
  uint32_t source_index_bytes, target_index_bytes;
} te_page_args;

typedef struct te_batch_entry {
  uint32_t is_pages; /* 0: `write`, 1: `pages` */
  te_write_args write;
  te_page_args pages;
} te_batch_entry;

/* One member of a target: where its part of a scatter goes, and the counter that then rises by one. */
typedef struct te_target_member {
  int32_t peer;      /* from te_peer; read only where `remote` is TE_NONE */
  te_handle remote;  /* from te_remote_region; TE_NONE: this member is only notified */
  te_handle counter; /* from te_remote_counter; TE_NONE: no notification */
} te_target_member;

/* How a scatter is spread over the NICs: see native/sharding.h. */
enum { TE_SHARD_AUTO = 0, TE_SHARD_PEERS = 1, TE_SHARD_BYTES = 2 };

/* Member i gets lengths[i] bytes from source_offsets[i] of `region` at target_offsets[i] of its remote region. Arrays have an
 * entry for each member and are read during the call only; NULL: zeros. */
typedef struct te_scatter_args {
  te_handle target;
  te_handle region; /* TE_NONE: nothing but notifications, which is a barrier */
  uint32_t flags;   /* TE_FLAG_* */
  uint32_t shard;   /* TE_SHARD_* */
  const int64_t *source_offsets, *lengths, *target_offsets;
} te_scatter_args;

/* When a transfer came by: nanoseconds of CLOCK_MONOTONIC, 0 where it has not (yet). The middle three are kept for scatters only. */
typedef struct te_times {
  int64_t submitted_ns;
  int64_t taken_ns;      /* by the worker */
  int64_t first_post_ns; /* the first member's work request was with the provider; 0 where that had to wait */
  int64_t posted_ns;     /* every member had its turn; those without room were left waiting */
  int64_t finished_ns;
} te_times;

/* --- library -------------------------------------------------------------------------------------------------------- */
int32_t te_abi_version(void);
uint64_t te_struct_bytes(const char *name); /* sizeof a struct by its name ("te_settings", ...), 0 if unknown */
const char *te_status_name(int32_t status);
void te_settings_defaults(te_settings *settings);
/* Is this transport usable here? TE_OK and `info` (provider and library names), or TE_ERR_TRANSPORT_UNAVAILABLE and the reason. */
int32_t te_transport_probe(const char *transport, te_engine_info *info, te_error *error);

/* One RDMA port as cx7 sees it. */
typedef struct te_rdma_port {
  char device[64];
  uint32_t port;
  uint32_t active;
  uint32_t lid;
  int32_t gid_index; /* -1: none can be used */
  uint8_t gid[16];
  char gid_kind[64]; /* "RoCE v2", "RoCE v1", "InfiniBand" */
  char interface[64];
  char link_layer[64]; /* "Ethernet", "InfiniBand"; others are not used */
  char state[64];
  char why[320];      /* why this GID */
  char unusable[320]; /* empty, or why nothing can be sent from this port */
  char remedy[320];   /* what to do about that; empty when there is nothing to do */
} te_rdma_port;
/* All ports below `root` ("" is this machine; tests give recorded trees). `rdma` NULL: the defaults. `count` is how many there are, also when
 * only `capacity` of them fit. */
int32_t te_rdma_ports(const char *root, const te_rdma_settings *rdma, te_rdma_port *ports, uint32_t capacity,
                      uint32_t *count, te_error *error);

/* --- bytes that travel ------------------------------------------------------------------------------------------------- */
int32_t te_address_encode(const te_address *address, uint8_t *bytes, uint64_t capacity, uint64_t *length,
                          te_error *error);
int32_t te_address_decode(const uint8_t *bytes, uint64_t length, te_address *address, te_error *error);
int32_t te_region_descriptor_encode(const te_region_descriptor *d, uint8_t *bytes, uint64_t capacity, uint64_t *length,
                                    te_error *error);
int32_t te_region_descriptor_decode(const uint8_t *bytes, uint64_t length, te_region_descriptor *d, te_error *error);
int32_t te_counter_descriptor_encode(const te_counter_descriptor *d, uint8_t *bytes, uint64_t capacity,
                                     uint64_t *length, te_error *error);
int32_t te_counter_descriptor_decode(const uint8_t *bytes, uint64_t length, te_counter_descriptor *d, te_error *error);

/* --- engine ---------------------------------------------------------------------------------------------------------- */
int32_t te_engine_open(const te_settings *settings, te_engine **engine, te_error *error);
/* Stops the worker, fails what is pending with TE_ERR_CLOSED, says goodbye to peers. Idempotent. After TE_OK nothing of any peer lands any
 * more. TE_ERR_TIMEOUT: everything is stopped all the same, but some peer has not confirmed that it drained: keep the memory. */
int32_t te_engine_close(te_engine *engine, int64_t timeout_ns, te_error *error);
/* Nanoseconds since the worker thread last went round. It does so at least every 100 ms; much more means that it is held inside the
 * provider (libfabric's shm can wait for ever for a lock that a killed process held), and that nothing of this engine will end. */
int64_t te_engine_silence(te_engine *engine);
/* Frees the memory. (Not that of an engine whose worker is held inside the provider: it is left alone.) After it no handle of the engine but its transfers (until released) may be used. Closes first if need be. */
void te_engine_free(te_engine *engine);
int32_t te_engine_describe(te_engine *engine, te_engine_info *info, te_error *error);
int32_t te_engine_address(te_engine *engine, te_address *address, te_error *error);
int32_t te_engine_stats(te_engine *engine, te_stats *stats, te_error *error);
int32_t te_nic_describe(te_engine *engine, uint32_t nic, te_nic_info *info, te_error *error);
/* A test hook of the simulated fabric: "nic_down 1", "nic_up 1", "kill", "partition ...": see native/sim. */
int32_t te_engine_inject(te_engine *engine, const char *command, te_error *error);

/* --- memory ------------------------------------------------------------------------------------------------------------ */
int32_t te_region_register(te_engine *engine, void *address, uint64_t length, int32_t device_kind, int32_t device_index,
                           te_handle *region, te_error *error);
/* The same for memory that another driver exports: `fd` is its dma-buf, and the memory begins there at `offset`. Nothing need be mapped at
 * `address`, by which this side calls it; it lies in its page where `offset` lies in its own. The caller may close `fd`
 * afterwards. TE_ERR_REGISTRATION says what the transport lacks. */
int32_t te_region_register_dmabuf(te_engine *engine, void *address, uint64_t length, int32_t device_kind,
                                  int32_t device_index, int32_t fd, uint64_t offset, te_handle *region,
                                  te_error *error);
/* GPU memory that the transport does not reach: it goes through pinned slots on both sides (settings staging_*), a copy each. */
int32_t te_region_register_staged(te_engine *engine, void *address, uint64_t length, int32_t device_index,
                                  te_handle *region, te_error *error);
int32_t te_region_info_get(te_engine *engine, te_handle region, te_region_info *info, te_error *error);
/* A GPU of this process, as CUDA numbers it. TE_ERR_TRANSPORT_UNAVAILABLE: no usable driver; TE_ERR_CONFIG: no such GPU. */
typedef struct te_device_info {
  char name[64];
  char pci[32];
  int32_t driver_version; /* of CUDA: 1000 * major + 10 * minor */
  int32_t devices;        /* how many there are */
  int32_t compute_major, compute_minor;
  uint32_t dmabuf; /* 1: its memory can be exported */
  uint32_t
      write_ordering; /* of what NICs write to it: 0: neither ordered nor to be flushed, 1: to be flushed, 2: ordered */
} te_device_info;
int32_t te_device_describe(int32_t index, te_device_info *info, te_error *error);
/* The GPU whose memory lies at an address. TE_ERR_ARGUMENT: none's. */
int32_t te_pointer_device(uint64_t address, int32_t *index, te_error *error);
/* Zeroed, pinned host memory that the device reaches at the same address. Not registered; until te_mapped_free. */
int32_t te_mapped_allocate(int32_t device_index, uint64_t length, void **memory, te_error *error);
void te_mapped_free(void *memory);
int32_t te_region_describe(te_engine *engine, te_handle region, te_region_descriptor *descriptor, te_error *error);
/* Refuses new use at once, revokes the region at every holder, waits until all have drained (or are lost and fenced), deregisters.
 * TE_ERR_TIMEOUT: some holder has not answered; the region stays refused and registered, call again. Idempotent. */
int32_t te_region_close(te_engine *engine, te_handle region, int64_t timeout_ns, te_error *error);
/* A handle for a peer's region; the same descriptor gives the same handle. */
int32_t te_remote_region(te_engine *engine, const te_region_descriptor *descriptor, te_handle *remote, te_error *error);

/* --- counters ---------------------------------------------------------------------------------------------------------- */
int32_t te_counter_open(te_engine *engine, te_handle *counter, te_error *error);
int32_t te_counter_describe(te_engine *engine, te_handle counter, te_counter_descriptor *descriptor, te_error *error);
int32_t te_counter_value(te_engine *engine, te_handle counter, uint64_t *value, te_error *error);
/* TE_OK: reached. TE_AGAIN: not within timeout_ns. `peers` (indices) may be NULL; the loss of one gives TE_ERR_PEER_LOST. */
int32_t te_counter_wait(te_engine *engine, te_handle counter, uint64_t at_least, int64_t timeout_ns,
                        const int32_t *peers, uint32_t peer_count, te_error *error);
/* The same as an operation: ends when reached; deadline timeout_ns. */
te_transfer *te_counter_reached(te_engine *engine, te_handle counter, uint64_t at_least, int64_t timeout_ns,
                                const int32_t *peers, uint32_t peer_count, te_error *error);
int32_t te_counter_close(te_engine *engine, te_handle counter, int64_t timeout_ns, te_error *error);
int32_t te_remote_counter(te_engine *engine, const te_counter_descriptor *descriptor, te_handle *counter,
                          te_error *error);

/* --- peers -------------------------------------------------------------------------------------------------------------- */
/* The index of the peer with this address; does not connect. The same identity and generation give the same index. */
int32_t te_peer(te_engine *engine, const te_address *address, int32_t *peer, te_error *error);
/* Also on a closed engine, until it is freed. */
int32_t te_peer_describe(te_engine *engine, int32_t peer, te_peer_info *info, te_error *error);
te_transfer *te_peer_connect(te_engine *engine, int32_t peer, int64_t timeout_ns, te_error *error);
te_transfer *te_peer_disconnect(te_engine *engine, int32_t peer, int64_t timeout_ns, te_error *error);
/* Ends when nothing of that peer can land any more in memory of this engine. */
te_transfer *te_peer_fence(te_engine *engine, int32_t peer, int64_t timeout_ns, te_error *error);

/* --- transfers: NULL means refused, with the reason in `error` and nothing posted. TE_AGAIN as the reason: no operation slot was
 * free for 50 ms (setting `operations`, or `operations_per_peer`); call again, or give up. te_send copies the data during the call. --- */
te_transfer *te_write(te_engine *engine, te_handle region, uint64_t source_offset, te_handle remote,
                      uint64_t target_offset, uint64_t length, te_handle counter, uint32_t flags, int64_t timeout_ns,
                      te_error *error);
te_transfer *te_write_pages(te_engine *engine, const te_page_args *pages, int64_t timeout_ns, te_error *error);
/* All entries are checked before the first is posted; one transfer for all of them. */
te_transfer *te_write_batch(te_engine *engine, const te_batch_entry *entries, uint64_t count, int64_t timeout_ns,
                            te_error *error);
te_transfer *te_send(te_engine *engine, int32_t peer, const void *data, uint64_t length, int64_t timeout_ns,
                     te_error *error);

/* --- peer groups: a target holds what is constant in writes to many peers; a scatter is one command and one transfer. A place is the
 * caller's own among the members, which decides whom it writes to first and over which NIC; -1: found by the identities of all,
 * which is right wherever the same engines form the group, whether each counts itself in or not. --- */
int32_t te_target_open(te_engine *engine, const te_target_member *members, uint32_t count, int32_t place,
                       te_handle *target, te_error *error);
/* For scatters that start from now on. `value` NULL: the member is missing, and its part fails. */
int32_t te_target_replace(te_engine *engine, te_handle target, uint32_t member, const te_target_member *value,
                          te_error *error);
/* Scatters under way go on. Idempotent. */
int32_t te_target_close(te_engine *engine, te_handle target, te_error *error);
te_transfer *te_scatter(te_engine *engine, const te_scatter_args *scatter, int64_t timeout_ns, te_error *error);
/* TE_AGAIN, with only the first time, while the transfer is under way. */
int32_t te_transfer_times(te_transfer *transfer, te_times *times);
/* The members whose part failed, each with its error, in the order of failure. `count` is how many there are, also when only `capacity` fit.
 * TE_AGAIN while the transfer is under way. */
int32_t te_transfer_failed_members(te_transfer *transfer, uint32_t *members, te_error *errors, uint32_t capacity,
                                   uint32_t *count);

/* --- prepared transfers: checked and copied once, posted many times, from any thread. What they name must be open at each post. --- */
int32_t te_prepare_write(te_engine *engine, const te_write_args *write, te_handle *prepared, te_error *error);
int32_t te_prepare_pages(te_engine *engine, const te_page_args *pages, te_handle *prepared, te_error *error);
int32_t te_prepare_scatter(te_engine *engine, const te_scatter_args *scatter, te_handle *prepared, te_error *error);
te_transfer *te_post(te_engine *engine, te_handle prepared, int64_t timeout_ns, te_error *error);
/* Transfers under way go on. Idempotent. */
int32_t te_prepared_close(te_engine *engine, te_handle prepared, te_error *error);

/* TE_OK once ended (see te_transfer_result), TE_AGAIN after timeout_ns. Spins briefly, then sleeps. */
int32_t te_transfer_wait(te_transfer *transfer, int64_t timeout_ns);
/* TE_AGAIN while under way, else the final status; `error` is filled for failures. */
int32_t te_transfer_result(te_transfer *transfer, te_error *error);
/* 1: no work request of it can land any more. */
int32_t te_transfer_quiesced(te_transfer *transfer);
int32_t te_transfer_wait_quiesced(te_transfer *transfer, int64_t timeout_ns); /* TE_OK or TE_AGAIN */
/* Asks for a TE_EVENT_TRANSFER with `user`. Returns 1 when the transfer has ended already: no event will come. At most once. */
int32_t te_transfer_notify(te_transfer *transfer, uint64_t user);
int32_t te_transfer_cancel(te_transfer *transfer);
void te_transfer_release(te_transfer *transfer);

/* --- GPU coordination: 64-bit words that CPU and GPU share. A *flag* is raised by this engine and waited for by a kernel (or a thread); a
 * *watcher* is raised by a kernel (or a thread) and watched by the worker. A `device` below zero is the host: the same without a GPU. The
 * memory behind all of it stays until te_engine_free: a kernel that was left behind may still look at it. --- */

/* Where a word lies: plain memory; pinned memory mapped for the device; memory of the device mapped for the CPU by GDRCopy; memory of
 * the device. */
enum { TE_WORD_HOST = 0, TE_WORD_MAPPED = 1, TE_WORD_GDR = 2, TE_WORD_DEVICE = 3 };

/* Why waits for a flag are to end without their epoch. */
enum {
  TE_ABORT_NONE = 0,
  TE_ABORT_PEER_LOST = 1, /* a peer that a binding of it names */
  TE_ABORT_DEADLINE = 2,  /* of a wait on the device, which set it */
  TE_ABORT_CLOSED = 3     /* the engine, or the flag */
};

typedef struct te_flag_info {
  uint64_t epoch;        /* now */
  uint64_t abort;        /* TE_ABORT_* */
  uint64_t early;        /* waits on the device that left without their epoch, since te_flag_clear */
  uint64_t epoch_host;   /* addresses: the epoch. Of gdr words the CPU reads it over the bus */
  uint64_t control_host; /* 64 bytes: [0] abort, [1] early, as 64-bit words */
  uint64_t epoch_device; /* the same for kernels; 0 on the host */
  uint64_t control_device;
  uint64_t taken_device; /* epochs consumed by waits on the device */
  uint32_t kind;         /* TE_WORD_* of the epoch */
  int32_t device;        /* -1: the host */
  int32_t abort_peer;    /* index; -1: none */
} te_flag_info;

/* `device` < 0: the host. TE_ERR_TRANSPORT_UNAVAILABLE: no CUDA driver, or with TE_GDR_REQUIRE no GDRCopy; the message says what. */
int32_t te_flag_open(te_engine *engine, int32_t device, te_handle *flag, te_error *error);
int32_t te_flag_describe(te_engine *engine, te_handle flag, te_flag_info *info, te_error *error);
int32_t te_flag_raise(te_engine *engine, te_handle flag, uint64_t by, te_error *error);
/* TE_OK: reached. TE_AGAIN: not within timeout_ns. TE_ERR_PEER_LOST, TE_ERR_TIMEOUT, TE_ERR_CLOSED: aborted. */
int32_t te_flag_wait(te_engine *engine, te_handle flag, uint64_t at_least, int64_t timeout_ns, te_error *error);
/* What aborted it is forgotten. (Not that the engine closed.) */
int32_t te_flag_clear(te_engine *engine, te_handle flag, te_error *error);
/* Waits for it end (TE_ABORT_CLOSED). Bindings and triggers that raise it go on, into the void. Idempotent. */
int32_t te_flag_close(te_engine *engine, te_handle flag, te_error *error);
/* The flag rises by one for each `every` arrivals since the counter was opened; those that came before the binding count. The loss
 * of one of `peers` (indices; may be NULL) aborts the flag. Ends with te_binding_close or the counter. */
int32_t te_counter_bind(te_engine *engine, te_handle counter, te_handle flag, uint64_t every, const int32_t *peers,
                        uint32_t peer_count, te_handle *binding, te_error *error);
/* Afterwards the flag rises no more by it. Idempotent. */
int32_t te_binding_close(te_engine *engine, te_handle binding, te_error *error);

typedef struct te_watcher_info {
  uint64_t value;
  uint64_t seen;           /* what the worker saw last; it looks while there is a trigger or te_watcher_notify */
  uint64_t host;           /* address for the CPU */
  uint64_t device_pointer; /* for kernels; 0 on the host */
  uint32_t kind;           /* TE_WORD_* */
  int32_t device;          /* -1: the host */
  uint32_t triggers;       /* armed */
} te_watcher_info;

int32_t te_watcher_open(te_engine *engine, int32_t device, te_handle *watcher, te_error *error);
int32_t te_watcher_describe(te_engine *engine, te_handle watcher, te_watcher_info *info, te_error *error);
/* A raise by the CPU. One side raises a watcher, the CPU or one GPU: their atomics do not know each other. Not of gdr words. */
int32_t te_watcher_add(te_engine *engine, te_handle watcher, uint64_t by, te_error *error);
/* Asks for TE_EVENT_WATCHER (`on` 1), or no more (0). At most one is pending: another comes when it changed after that was fetched. */
int32_t te_watcher_notify(te_engine *engine, te_handle watcher, uint32_t on, te_error *error);
/* The value given last (or that of te_watcher_notify), and now. TE_AGAIN: they are the same. By the thread that fetches events. */
int32_t te_watcher_take(te_engine *engine, te_handle watcher, uint64_t *before, uint64_t *now, te_error *error);
/* Its triggers are cancelled. The word may serve again: nothing may raise it any more. Idempotent. */
int32_t te_watcher_close(te_engine *engine, te_handle watcher, te_error *error);

/* With the value v of the watcher, the worker has posted `prepared` once for each k >= 0 with first + k * every <= v. */
typedef struct te_trigger_args {
  te_handle watcher, prepared;
  te_handle posted_flag;    /* TE_NONE, or rises by one when the first work request of a firing is with the provider */
  te_handle completed_flag; /* TE_NONE, or rises by one when the transfer of a firing has ended well */
  uint64_t every, first;    /* at least 1 */
  int64_t timeout_ns;       /* of each transfer */
} te_trigger_args;

typedef struct te_trigger_info {
  uint64_t fired;       /* begun, those that failed at once included */
  uint64_t posted;      /* of those: the first work request went out */
  uint64_t completed;   /* ended well */
  uint64_t failed;      /* ended otherwise */
  uint64_t owed;        /* due, and not yet begun: no operation slot was free, or the peer was at its cap */
  int64_t last_post_ns; /* of the last firing: from its begin to its first work request */
  uint32_t active;      /* 0: cancelled */
  te_error first_error; /* of those that failed */
} te_trigger_info;

int32_t te_trigger_open(te_engine *engine, const te_trigger_args *trigger, te_handle *handle, te_error *error);
int32_t te_trigger_describe(te_engine *engine, te_handle trigger, te_trigger_info *info, te_error *error);
/* TE_OK: so many have ended well. TE_AGAIN: not within timeout_ns. Else what the first one that failed ended with. */
int32_t te_trigger_wait(te_engine *engine, te_handle trigger, uint64_t completed, int64_t timeout_ns, te_error *error);
/* Afterwards nothing fires; what is under way goes on, and is counted. Idempotent. */
int32_t te_trigger_cancel(te_engine *engine, te_handle trigger, te_error *error);
/* Likewise, and gives the handle up. Idempotent. */
int32_t te_trigger_close(te_engine *engine, te_handle trigger, te_error *error);

/* --- messages ----------------------------------------------------------------------------------------------------------- */
int32_t te_message_receive(te_engine *engine, int64_t timeout_ns, te_message *message,
                           te_error *error); /* TE_AGAIN: none came */
void te_message_release(te_engine *engine, te_message *message);

/* --- events, for one dispatcher thread --------------------------------------------------------------------------------------- */
/* Waits up to timeout_ns, then fetches up to `capacity`. TE_AGAIN: none. TE_ERR_CLOSED: the engine has closed and all were fetched. */
int32_t te_events_fetch(te_engine *engine, int64_t timeout_ns, te_event *events, uint32_t capacity, uint32_t *count,
                        te_error *error);
int32_t te_events_wake(te_engine *engine); /* makes a waiting te_events_fetch return TE_AGAIN */

/* END CDEF */

#ifdef __cplusplus
}
#endif
#endif /* TE_H_ */
