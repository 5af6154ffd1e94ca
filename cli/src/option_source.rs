//! Which environment variable set an option, so that an error about the option can name it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Mutex, PoisonError};

/// The variables that say what no flag does: the option that each is for, and `NAME="value"`.
static TAKEN: Mutex<BTreeMap<&str, String>> = Mutex::new(BTreeMap::new());

/// Takes an option from a variable.
pub(crate) fn take(option: &'static str, name: &str, value: &OsStr) {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    taken.insert(option, format!("{name}={value:?}"));
}

/// A sentence about some options, with the variable that said one of them if no flag did: nobody
/// looks for the fault there otherwise.
pub(crate) fn with_variable(options: &[&str], why: String) -> String {
    let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    match options.iter().find_map(|option| taken.get(option)) {
        Some(variable) => format!("{variable}: {why}"),
        None => why,
    }
}
