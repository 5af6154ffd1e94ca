//! A progress line on the terminal. It is drawn only if standard error is a terminal.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use racksum_net::clock::Clock;
use racksum_proto::time::Time;
use racksum_worker::{Client, ConnectError, ConnectOptions, Connecting};
use rustix::termios::tcgetwinsize;

use crate::stderr;
use crate::thread::spawn;

/// Delay before the line is first drawn, so that short work shows no line.
const SOON: Duration = Duration::from_secs(2);
/// Interval at which the line is redrawn.
const PERIOD: Duration = Duration::from_millis(500);

/// A progress line that is redrawn until this value is dropped.
#[derive(Debug)]
pub(crate) struct Line {
    /// Locked while the line is drawn and while other output is printed.
    turn: Arc<Mutex<()>>,
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Line {
    /// Starts a thread that draws `text(elapsed)`, first after [`SOON`] and then every [`PERIOD`].
    pub(crate) fn start(text: impl Fn(Duration) -> String + Send + 'static) -> Self {
        let turn = Arc::<Mutex<()>>::default();
        // A dumb terminal cannot overwrite a line.
        let is_dumb = std::env::var_os("TERM").is_some_and(|kind| kind == "dumb");
        if !std::io::stderr().is_terminal() || is_dumb {
            return Self { turn, end: None, thread: None };
        }
        let (end, ended) = channel::<()>();
        let shared = Arc::clone(&turn);
        // If the thread cannot start, the line is not drawn.
        let thread = spawn(move || {
            let clock = Clock::start();
            let began = clock.now();
            let mut pause = SOON;
            while ended.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                pause = PERIOD;
                let passed = Duration::from_nanos(clock.now().since(began).0);
                let text = text(passed);
                let _turn = shared.lock().unwrap_or_else(PoisonError::into_inner);
                stderr::overwrite_line(format_args!("\r{}\x1b[K", within(columns(), &text)));
            }
        });
        Self { turn, end: Some(end), thread: thread.ok() }
    }

    /// Clears the line and calls `print`, which prints other output. The line is later drawn again
    /// below that output.
    pub(crate) fn print<T>(&self, print: impl FnOnce() -> T) -> T {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if self.thread.is_some() {
            stderr::overwrite_line(CLEAR);
        }
        print()
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // The thread has already printed its own panic.
            drop(thread.join());
            stderr::overwrite_line(CLEAR);
        }
    }
}

/// Returns the width of the terminal in columns.
fn columns() -> usize {
    let size = tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col);
    // Some terminals report a width of 0.
    if size == 0 { 80 } else { size.into() }
}

/// Cuts a text to one row of the terminal, because redrawing would not overwrite a second row.
fn within(columns: usize, text: &str) -> Cow<'_, str> {
    let room = columns.saturating_sub(1);
    if text.chars().count() <= room {
        return text.into();
    }
    let kept: String = text.chars().take(room.saturating_sub(1)).collect();
    (kept + "…").into()
}

/// Control sequence that moves to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[K";

/// Joins a job while a progress line shows what the join waits for, such as missing ranks.
pub(crate) fn connect(options: &ConnectOptions) -> Result<Client, ConnectError> {
    let connecting = Connecting::new();
    let awaited = connecting.awaited();
    let (rank, job) = (options.rank, options.job.clone());
    let _line = Line::start(move |passed| {
        let awaited = awaited.now();
        format!("rank {rank} of job {job:?} waits for {awaited} ({} s)", passed.as_secs())
    });
    connecting.run(options)
}

/// Progress of a piece of work, counted in any unit.
#[derive(Debug)]
pub(crate) struct Work {
    all: u64,
    done: AtomicU64,
}

impl Work {
    pub(crate) fn new(all: u64) -> Arc<Self> {
        Arc::new(Self { all, done: AtomicU64::new(0) })
    }

    pub(crate) fn advance(&self, by: u64) {
        self.done.fetch_add(by, Relaxed);
    }

    pub(crate) fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }

    /// Raises the counter to `done`; never lowers it.
    pub(crate) fn reach(&self, done: u64) {
        self.done.fetch_max(done, Relaxed);
    }

    /// Describes the progress after an elapsed time, with an estimate of the time left at the same
    /// pace.
    pub(crate) fn text(&self, passed: Duration) -> String {
        let (all, done) = (self.all.max(1) as f64, self.done.load(Relaxed) as f64);
        let share = (done / all).min(1.0);
        let percent = (100.0 * share).floor();
        if share <= 0.0 {
            return format!("{percent} % in {} s", passed.as_secs());
        }
        let left = passed.as_secs_f64() * (1.0 - share) / share;
        format!("{percent} % in {} s, about {left:.0} s left", passed.as_secs())
    }
}

/// Rate limiter for progress reports.
#[derive(Debug)]
pub(crate) struct Pace {
    clock: Clock,
    last: Time,
}

impl Pace {
    pub(crate) fn start() -> Self {
        let clock = Clock::start();
        Self { clock, last: clock.now() }
    }

    /// Returns whether a report is due. At most one report is due in each [`PERIOD`].
    pub(crate) fn is_due(&mut self) -> bool {
        let now = self.clock.now();
        let is_due = u128::from(now.since(self.last).0) >= PERIOD.as_nanos();
        if is_due {
            self.last = now;
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_in_a_row_of_the_terminal() {
        assert_eq!(within(6, "rank 0"), "rank…");
        assert_eq!(within(7, "rank 0"), "rank 0");
        assert_eq!(within(4, "größer"), "gr…");
        assert_eq!(within(0, "any"), "…");
    }

    #[test]
    fn the_rest_takes_as_long_as_what_is_done_took() {
        let work = Work::new(400);
        let after = |seconds| work.text(Duration::from_secs(seconds));
        assert_eq!(after(3), "0 % in 3 s");
        work.advance(100);
        assert_eq!(after(10), "25 % in 10 s, about 30 s left");
        work.advance(299);
        assert_eq!(after(100), "99 % in 100 s, about 0 s left");
        work.reach(300);
        assert_eq!(work.done(), 399);
        work.reach(404);
        assert_eq!(after(100), "100 % in 100 s, about 0 s left");
    }
}
