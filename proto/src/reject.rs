//! Reasons for rejected datagrams, and a counter for each.

/// The reason why a datagram was rejected. A rejected datagram changes nothing but a counter, whose
/// index is the discriminant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Reject {
    /// The datagram is shorter than a header, or its length does not match its headers.
    Truncated,
    /// The magic number belongs to another protocol.
    Magic,
    /// This build does not support the protocol version.
    Version,
    /// The kind is unknown, or this side does not accept it.
    Kind,
    /// A bit that must be zero is set.
    Reserved,
    /// The datagram belongs to another job.
    Job,
    /// Authentication failed: no holder of the key made the datagram.
    Forged,
    /// The datagram is authentic, but it was accepted before, or it is too old to rule that out.
    Replayed,
    /// The datagram belongs to another generation, such as an earlier life of the job.
    Generation,
    /// The sender is unknown or of the wrong kind, or its address differs from the one that the
    /// rank joined with.
    Sender,
    /// The lane or shard does not exist.
    Stream,
    /// The body is malformed for its kind.
    Body,
    /// The descriptor is invalid in itself.
    Descriptor,
    /// The op or window is already settled.
    Stale,
    /// The data or result belongs to a window that the rank has not opened, or whose open was lost.
    Unopened,
    /// The data belongs to a window that the sender opened as zero.
    Unowed,
    /// The window is beyond the reach of the pool.
    BeyondPool,
    /// The op is further ahead than the job's limit on ops in flight allows.
    BeyondOps,
    /// The block mask, the length or the fragment number does not fit the window.
    Shape,
    /// The job's messages have cost more than the job's share of the shard's time.
    Overdrawn,
}

impl Reject {
    /// The number of reasons.
    pub const COUNT: usize = 20;

    /// All reasons, in the order of their discriminants.
    pub const ALL: [Self; Self::COUNT] = [
        Self::Truncated,
        Self::Magic,
        Self::Version,
        Self::Kind,
        Self::Reserved,
        Self::Job,
        Self::Forged,
        Self::Replayed,
        Self::Generation,
        Self::Sender,
        Self::Stream,
        Self::Body,
        Self::Descriptor,
        Self::Stale,
        Self::Unopened,
        Self::Unowed,
        Self::BeyondPool,
        Self::BeyondOps,
        Self::Shape,
        Self::Overdrawn,
    ];

    /// Returns the reason's name in counters.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Magic => "magic",
            Self::Version => "version",
            Self::Kind => "kind",
            Self::Reserved => "reserved",
            Self::Job => "job",
            Self::Forged => "forged",
            Self::Replayed => "replayed",
            Self::Generation => "generation",
            Self::Sender => "sender",
            Self::Stream => "stream",
            Self::Body => "body",
            Self::Descriptor => "descriptor",
            Self::Stale => "stale",
            Self::Unopened => "unopened",
            Self::Unowed => "unowed",
            Self::BeyondPool => "beyond_pool",
            Self::BeyondOps => "beyond_ops",
            Self::Shape => "shape",
            Self::Overdrawn => "overdrawn",
        }
    }
}

/// The number of rejected datagrams for each reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rejects([u64; Reject::COUNT]);

impl Rejects {
    /// Counts one datagram rejected for `reject`.
    pub fn count(&mut self, reject: Reject) {
        self.0[reject as usize] += 1;
    }

    /// Returns the number of datagrams rejected for `reject`.
    #[must_use]
    pub const fn of(&self, reject: Reject) -> u64 {
        self.0[reject as usize]
    }

    /// Returns each reason with its number of rejected datagrams.
    pub fn iter(&self) -> impl Iterator<Item = (Reject, u64)> {
        Reject::ALL.into_iter().zip(self.0)
    }

    /// Returns the total number of rejected datagrams.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }
}
