//! The OCI description of a sandbox (`config.json`, OCI runtime specification 1.0.2).

use runtime::SandboxSpec;
use serde_json::{Value, json};

/// What root inside may do. Not CAP_NET_ADMIN (an address added to `lo` makes images that don't
/// restore) and not CAP_NET_RAW's bigger siblings; CAP_SYS_ADMIN is here only because setting the
/// hostname needs it: the guest drops it from everything it starts.
const CAPABILITIES: [&str; 17] = [
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_LEASE",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_ADMIN",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
];

/// Size of each of `/tmp`, `/run` and `/dev/shm` where the session has no memory limit.
const DEFAULT_TMPFS_BYTES: u64 = 1 << 30;

/// The `config.json` of `spec`.
pub fn config(spec: &SandboxSpec) -> Value {
    // What lies in these counts as memory, so together they leave half of it to programs.
    let tmpfs = spec.resources.memory_bytes.map_or(DEFAULT_TMPFS_BYTES, |limit| (limit.0 / 4).clamp(16 << 20, 8 << 30));
    let tmpfs_mount = |at: &str, mode: &str| {
        json!({"destination": at, "type": "tmpfs", "source": "tmpfs",
               "options": ["nosuid", "nodev", format!("mode={mode}"), format!("size={tmpfs}")]})
    };
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": spec.argv,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {"bounding": CAPABILITIES, "effective": CAPABILITIES, "permitted": CAPABILITIES},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 65_536, "hard": 1_048_576}],
            "noNewPrivileges": true,
        },
        "root": {"path": spec.root, "readonly": false},
        "hostname": spec.hostname,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
            // The guest keeps each program's process tree together by these.
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev"]},
            tmpfs_mount("/tmp", "1777"),
            tmpfs_mount("/run", "755"),
            tmpfs_mount("/dev/shm", "1777"),
        ],
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}],
        },
    })
}
