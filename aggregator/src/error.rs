//! The reasons why an aggregator does not start.

use std::io;
use std::path::PathBuf;

use racksum_net::{NetError, with_limit};

use crate::config::ConfigError;

/// The reason why an aggregator did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A socket could not be opened, or an identity could not be read.
    #[error("{0}")]
    Net(#[from] NetError),
    /// The status socket could not be bound.
    #[error(
        "cannot bind the status socket {}: {}; choose another path with --status-socket",
        path.display(), with_limit(cause)
    )]
    StatusSocket {
        /// The path of the socket.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// The system refuses to give this process more memory.
    #[error("{}", no_memory(*mib, Options::USUAL.memory))]
    Memory {
        /// The requested packet buffers of each shard, in MiB.
        mib: usize,
    },
    /// A thread, or the descriptor that wakes it, could not be created.
    #[error(
        "cannot create a thread or its descriptors: {0}; raise the limits on threads (ulimit -u) \
         and on open files (ulimit -n)"
    )]
    Thread(#[from] io::Error),
    /// The parent's address is unusable, and a retry would not help.
    #[error("--parent: {0}")]
    Parent(String),
    /// Multicast is required, but the bind address is not the address of one interface.
    #[error("--fanout multicast needs --bind with the address of one interface, not {0}")]
    NoMulticast(std::net::IpAddr),
    /// Multicast is required, but the interface does not support it.
    #[error("--fanout multicast is not possible: {0}")]
    Multicast(NetError),
}

/// The names of an aggregator's start-up options, for use in error messages.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The name of the port option.
    pub port: &'static str,
    /// The name of the identity file option.
    pub identity: &'static str,
    /// The names of the options that set the amount of memory; may be empty.
    pub memory: &'static [&'static str],
}

impl Options {
    /// The options of `racksum aggregator`.
    pub const USUAL: Self =
        Self { port: "--port", identity: "`identity`", memory: &["--pool-mib", "--shards"] };
}

impl StartError {
    /// Returns the error message with these option names.
    #[must_use]
    pub fn message_with_options(&self, options: &Options) -> String {
        match self {
            Self::Net(error) => error.message_with_options(options.port, options.identity),
            Self::Config(error) => error.message_with_options(options.memory),
            Self::Memory { mib } => no_memory(*mib, options.memory),
            other => other.to_string(),
        }
    }
}

fn no_memory(mib: usize, options: &[&str]) -> String {
    let lower = match options {
        [] => String::new(),
        options => format!("lower {}, or ", options.join(" or ")),
    };
    format!(
        "cannot allocate {mib} MiB of packet buffers for each shard; {lower}raise the limit on \
         this process's memory (ulimit -v)"
    )
}
