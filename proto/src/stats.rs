//! The counters that a rank's session shows.
//!
//! A counter has the name of its field everywhere: Python's `session.stats()` lists the fields, and
//! a sidecar sends them to its ranks by name. [`crate::status`] has the counters of a shard. On
//! both sides, [`crate::observer`] counts the events of the state machines.

use serde::{Deserialize, Serialize};

/// Defines a struct of counters, with a method that lists them by name.
macro_rules! counters {
    (
        $(#[$of_struct:meta])*
        pub struct $name:ident {
            $($(#[$of_field:meta])* pub $field:ident: u64,)+
        }
    ) => {
        $(#[$of_struct])*
        pub struct $name {
            $($(#[$of_field])* pub $field: u64,)+
        }

        impl $name {
            /// Returns each counter with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field)),+].into_iter()
            }
        }
    };
}

counters! {
    /// The traffic of a worker. Bytes count UDP payload only.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    pub struct Stats {
        /// Bytes sent.
        pub tx_bytes: u64,
        /// Bytes received.
        pub rx_bytes: u64,
        /// Datagrams sent.
        pub tx_datagrams: u64,
        /// Datagrams received.
        pub rx_datagrams: u64,
        /// Data fragments sent again.
        pub retransmits: u64,
        /// Nacks sent to request results.
        pub asks: u64,
        /// Nacks sent because nothing had arrived. [`Self::asks`] includes them.
        pub probes: u64,
        /// Messages and datagrams that were rejected.
        pub rejects: u64,
        /// Datagrams that the kernel dropped because the receive buffer was full. A run of
        /// datagrams that the kernel joined counts as one.
        pub kernel_drops: u64,
        /// Sends that the kernel refused, or had no room for in time. The counts of sent datagrams
        /// and bytes include them.
        pub send_failures: u64,
    }
}

counters! {
    /// Counts of the ops that a rank has started at its sidecar, and of their bytes. In Python, the
    /// names of these counters begin with `sidecar_`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct SidecarStats {
        /// Ops that the rank has started.
        pub ops: u64,
        /// Bytes of tensors that lie in shared memory, where they are reduced in place.
        pub shared_bytes: u64,
        /// Bytes copied to and from shared memory.
        pub copied_bytes: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_has_the_name_of_its_field() {
        let stats = SidecarStats { ops: 1, shared_bytes: 2, copied_bytes: 3 };
        assert!(stats.named().eq([("ops", 1), ("shared_bytes", 2), ("copied_bytes", 3)]));
    }
}
