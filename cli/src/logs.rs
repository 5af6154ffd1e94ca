//! What is logged on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::exit::Failure;
use crate::{environment, stderr};

/// Logs from now on what the flag says, or else the variable, or else warnings.
///
/// # Errors
/// A sentence that names the flag or the variable, if it cannot be understood.
pub(crate) fn start(flag: Option<String>) -> Result<(), Failure> {
    let (name, log) = match flag {
        Some(log) => ("--log", log),
        None => (environment::LOG, environment::variable(environment::LOG)?.unwrap_or_default()),
    };
    let filter = filter(&log).map_err(|why| Failure::usage(format!("{name} {log:?}: {why}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(stderr::lines)
        .with_target(false)
        .init();
    Ok(())
}

/// Reads what to log. Warnings are logged of all modules that it does not name.
fn filter(log: &str) -> Result<EnvFilter, String> {
    let valid = "give off, error, warn, info, debug or trace, or module=level";
    // A word alone would be a module of which all is logged, and nothing of others.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let mut words = log.split(',').map(str::trim).filter(|word| !word.is_empty());
    if let Some(word) = words.find(|word| !word.contains(['=', '[', ']']) && !is_level(word)) {
        return Err(format!("{word:?} is no level; {valid}"));
    }
    EnvFilter::try_new(format!("warn,{log}")).map_err(|error| format!("{error}; {valid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_logged_unless_they_are_turned_off() {
        let filter = |log| filter(log).map(|filter| filter.to_string());
        assert_eq!(filter("").unwrap(), "warn");
        assert_eq!(filter("INFO").unwrap(), "info");
        assert_eq!(filter("off").unwrap(), "off");
        assert_eq!(filter("racksum_worker=debug").unwrap(), "racksum_worker=debug,warn");
        assert!(filter("[span{field}]=debug, info").is_ok());
        for wrong in ["nonsense", "info,nonsense", "racksum_worker=nonsense", "a=b=c"] {
            let why = filter(wrong).unwrap_err();
            assert!(
                why.ends_with("; give off, error, warn, info, debug or trace, or module=level")
            );
        }
    }
}
