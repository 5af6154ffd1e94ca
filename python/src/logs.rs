//! A buffer that holds the worker's log records until the package passes them to `logging`. The
//! worker's threads must not pass records directly, because they would wait for the GIL, and a
//! thread that holds the GIL may be waiting for them.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, Once, PoisonError};

use pyo3::pyfunction;
use tracing::field::{Field, Visit};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

/// The maximum number of records in the buffer. A full buffer drops new records.
const MOST: usize = 1000;

/// A record: its level number in `logging`, its source, and its text.
type Record = (u8, String, String);

static KEPT: Mutex<VecDeque<Record>> = Mutex::new(VecDeque::new());
static ANY: AtomicBool = AtomicBool::new(false);
/// The lowest level to keep, as a `logging` level number.
static LEAST: AtomicU8 = AtomicU8::new(WARNING);
static INSTALLED: Once = Once::new();

const WARNING: u8 = 30;

/// Sets the lowest level to keep, as a `logging` level number. The first call installs the buffer.
#[pyfunction]
pub(crate) fn keep_logs(least: u8) {
    LEAST.store(least, Relaxed);
    INSTALLED.call_once(|| {
        // If the process already has a subscriber, leave it in place.
        drop(tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Keeper)));
    });
}

/// Removes and returns the kept records, oldest first.
#[pyfunction]
pub(crate) fn take_logs() -> Vec<Record> {
    if !ANY.swap(false, Relaxed) {
        return Vec::new();
    }
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
}

struct Keeper;

impl<S: Subscriber> Layer<S> for Keeper {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // Call `enabled` for every event, because the lowest level to keep may change.
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        name_of(metadata).starts_with("racksum")
            && level_of(*metadata.level()) >= LEAST.load(Relaxed)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let metadata = event.metadata();
        let record = (level_of(*metadata.level()), name_of(metadata).replace("::", "."), text.0);
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MOST {
            kept.push_back(record);
        }
        ANY.store(true, Relaxed);
    }
}

/// Returns the source of a record, without the underscore that starts the extension's name.
fn name_of<'a>(metadata: &Metadata<'a>) -> &'a str {
    metadata.target().trim_start_matches('_')
}

/// Converts a level to a `logging` level number. `TRACE`, for which `logging` has no name, becomes
/// 5.
fn level_of(level: Level) -> u8 {
    match level {
        Level::ERROR => 40,
        Level::WARN => WARNING,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// The text of a record: its message, then its fields.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let space = if self.0.is_empty() { "" } else { " " };
        // Writing to a string cannot fail.
        let _written = match field.name() {
            "message" => write!(self.0, "{space}{value:?}"),
            name => write!(self.0, "{space}{name}={value:?}"),
        };
    }
}
