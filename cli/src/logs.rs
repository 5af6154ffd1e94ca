//! The log on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::exit::Failure;
use crate::{environment, stderr};

/// Starts logging. The filter comes from `--log`, or else from [`environment::LOG`]; the default is
/// warnings only.
///
/// # Errors
/// A message that names the flag or the variable, if its filter is invalid.
pub(crate) fn start(flag: Option<String>) -> Result<(), Failure> {
    let (name, log) = match flag {
        Some(log) if log.trim().is_empty() => {
            return Err(Failure::usage(format!("--log is empty; {VALID}")));
        }
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

/// Turns off a library's warnings about datagrams that the kernel rejected. The warnings lack the
/// destination, but the caller's own error names it.
const QUIET: &str = "quinn_udp=off";

const VALID: &str = "use off, error, warn, info, debug or trace, or module=level";

/// Parses a log filter, whose default level is `warn`.
fn filter(log: &str) -> Result<EnvFilter, String> {
    // `EnvFilter` would treat an unknown level as the name of a module.
    let is_level = |word: &str| word.parse::<LevelFilter>().is_ok();
    let mut words = log.split(',').map(str::trim).filter(|word| !word.is_empty());
    if let Some(word) = words.find(|word| !word.contains(['=', '[', ']']) && !is_level(word)) {
        return Err(format!("{word:?} is not a log level; {VALID}"));
    }
    EnvFilter::try_new(format!("warn,{QUIET},{log}")).map_err(|error| format!("{error}; {VALID}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_logged_unless_they_are_turned_off() {
        let filter = |log| filter(log).map(|filter| filter.to_string());
        assert_eq!(filter("").unwrap(), "quinn_udp=off,warn");
        assert_eq!(filter("INFO").unwrap(), "quinn_udp=off,info");
        assert_eq!(filter("off").unwrap(), "quinn_udp=off,off");
        assert_eq!(filter("quinn_udp=trace").unwrap(), "quinn_udp=trace,warn");
        let own = filter("racksum_worker=debug").unwrap();
        assert_eq!(own, "racksum_worker=debug,quinn_udp=off,warn");
        assert!(filter("[span{field}]=debug, info").is_ok());
        for wrong in ["nonsense", "info,nonsense", "racksum_worker=nonsense", "a=b=c"] {
            let why = filter(wrong).unwrap_err();
            assert!(why.ends_with("; use off, error, warn, info, debug or trace, or module=level"));
        }
    }
}
