//! Why a datagram changed nothing, and how often each reason came.

/// Why a datagram changed nothing but a counter. The discriminant indexes the drop counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Reject {
    /// Shorter than a header, or than its header says.
    Truncated,
    /// The magic number is another protocol's.
    Magic,
    /// A version of the protocol that this build does not speak.
    Version,
    /// An unknown kind, or one that this side does not take.
    Kind,
    /// A bit that must be zero is not.
    Reserved,
    /// Another job's.
    Job,
    /// Not authentic: no holder of the key has made it.
    Forged,
    /// Authentic, and taken before, or too old to tell.
    Replayed,
    /// Another generation's: an earlier life of the job.
    Generation,
    /// No such rank, or not from the address the rank joined with.
    Sender,
    /// No such lane or shard.
    Stream,
    /// The body is not what its kind asks for.
    Body,
    /// The descriptor is impossible in itself.
    Descriptor,
    /// An op or window that was settled before.
    Stale,
    /// Data of a window whose op the sender has not opened (or whose open was lost).
    Unopened,
    /// Data of a window that the sender's open said is zero.
    Unowed,
    /// Further ahead than the pool reaches.
    BeyondPool,
    /// More ops ahead than the job was granted.
    BeyondOps,
    /// The block mask, the length or the fragment number does not fit the window.
    Shape,
    /// The job's messages cost the shard more than the job's share of it.
    Overdrawn,
}

impl Reject {
    /// How many reasons there are.
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

    /// The reason's name in counters.
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

/// How many datagrams were rejected, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rejects([u64; Reject::COUNT]);

impl Rejects {
    /// Counts one.
    pub fn count(&mut self, reject: Reject) {
        self.0[reject as usize] += 1;
    }

    /// How many were rejected for `reject`.
    #[must_use]
    pub const fn of(&self, reject: Reject) -> u64 {
        self.0[reject as usize]
    }

    /// The reasons, and how many were rejected for each.
    pub fn iter(&self) -> impl Iterator<Item = (Reject, u64)> {
        Reject::ALL.into_iter().zip(self.0)
    }

    /// How many were rejected in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Adds another's counts to these.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine += theirs;
        }
    }
}
