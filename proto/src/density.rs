//! The mean size of recent windows, to estimate the bytes still to come.

/// A running mean over the windows of a stream, including windows of zeros.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Density {
    windows: u64,
    bytes: u64,
}

impl Density {
    /// Records `windows` windows, whose results have `bytes` bytes in total.
    pub(crate) fn note(&mut self, windows: u64, bytes: usize) {
        if self.windows > Self::MEMORY {
            self.windows /= 2;
            self.bytes /= 2;
        }
        self.windows += windows;
        self.bytes += bytes as u64;
    }

    /// Returns the expected bytes of `windows` more windows, or 0 if no window has been recorded
    /// yet.
    pub(crate) const fn of(&self, windows: u64) -> u64 {
        match self.windows {
            0 => 0,
            noted => self.bytes.saturating_mul(windows) / noted,
        }
    }

    /// The number of windows after which the weight of earlier windows is halved.
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
