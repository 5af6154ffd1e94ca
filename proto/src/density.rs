//! How many bytes windows have come to lately: from that follows how much is still to come.

/// A running mean over the windows of a stream, those of zeros as well.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Density {
    windows: u64,
    bytes: u64,
}

impl Density {
    /// Notes that so many windows had results of so many bytes together.
    pub(crate) fn note(&mut self, windows: u64, bytes: usize) {
        if self.windows > Self::MEMORY {
            self.windows /= 2;
            self.bytes /= 2;
        }
        self.windows += windows;
        self.bytes += bytes as u64;
    }

    /// What so many windows come to, if they are like the last; nothing before there were any.
    pub(crate) const fn of(&self, windows: u64) -> u64 {
        match self.windows {
            0 => 0,
            noted => self.bytes.saturating_mul(windows) / noted,
        }
    }

    /// After as many windows, those before count for half.
    const MEMORY: u64 = 64;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_what_windows_come_to() {
        let mut density = Density::default();
        assert_eq!(density.of(1000), 0);
        density.note(4, 100);
        assert_eq!(density.of(8), 200);
        for _ in 0..1000 {
            density.note(1, 64 << 10);
        }
        assert!(density.of(100) > 99 * (64 << 10), "{density:?}");
        for _ in 0..100 {
            density.note(60, 1024);
        }
        assert!(density.of(6000) < 110 * 1024, "{density:?}");
    }
}
