//! Records which environment variable set an option, so that an error about the option can name it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Mutex, PoisonError};

/// Maps an option to the variable that set it, as `NAME="value"`.
static TAKEN: Mutex<BTreeMap<&str, String>> = Mutex::new(BTreeMap::new());

/// Records that a variable sets an option.
pub(crate) fn take(option: &'static str, name: &str, value: &OsStr) {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken.insert(option, format!("{name}={value:?}"));
}

/// Prefixes an error about options with the variable that set one of them, because the user might
/// not look for the cause in the environment.
pub(crate) fn with_variable(options: &[&str], why: String) -> String {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    match options.iter().find_map(|option| taken.get(option)) {
        Some(variable) => format!("{variable}: {why}"),
        None => why,
    }
}
