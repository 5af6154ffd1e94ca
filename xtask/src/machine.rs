//! What the tests need of the machine: `ip` and `tc`, and the right to make network namespaces.
//!
//! Only the tests of slow and lossy links need these, and they skip themselves without; so what
//! is missing here is said in one line and is no failure.

use std::env;
use std::path::Path;

use anyhow::Result;

use crate::shell::Cmd;

/// The programs the tests of links call.
const LINK_TOOLS: [&str; 2] = ["ip", "tc"];

/// What tests do without when the machine lacks something.
const SKIPPED: &str = "tests of slow and lossy links will be skipped";

/// Checks the machine and installs what is missing where it may.
pub(crate) fn set_up(root: &Path) -> Result<()> {
    let is_root = Cmd::new("sh", &["-c", "test \"$(id -u)\" = 0"]).succeeds(root);
    match plan(missing_tools(), is_root, on_path("apt-get")) {
        Plan::Nothing => {}
        Plan::Install => {
            Cmd::new("apt-get", &["update", "-q"]).run(root)?;
            Cmd::new("apt-get", &["install", "-q", "-y", "iproute2"])
                .env("DEBIAN_FRONTEND", "noninteractive")
                .run(root)?;
        }
        Plan::Skip(why) => {
            println!("{why}: {SKIPPED}");
            return Ok(());
        }
    }
    if Cmd::new("unshare", &["--net", "true"]).succeeds(root) {
        println!("ip, tc and network namespaces: there");
    } else if is_root {
        println!("root here may not make network namespaces: {SKIPPED}");
    } else {
        println!("not root, so no network namespaces: {SKIPPED}");
    }
    Ok(())
}

/// What to do about missing programs.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Nothing,
    Install,
    Skip(String),
}

fn plan(missing: Vec<&str>, is_root: bool, has_apt: bool) -> Plan {
    if missing.is_empty() {
        return Plan::Nothing;
    }
    let missing = missing.join(" and ");
    match (is_root, has_apt) {
        (true, true) => Plan::Install,
        (true, false) => Plan::Skip(format!("{missing} not found (and no apt-get to install it)")),
        (false, _) => Plan::Skip(format!("{missing} not found and not root to install it")),
    }
}

fn missing_tools() -> Vec<&'static str> {
    LINK_TOOLS.into_iter().filter(|tool| !on_path(tool)).collect()
}

fn on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tools_are_installed_by_root_alone() {
        assert_eq!(plan(vec![], false, false), Plan::Nothing);
        assert_eq!(plan(vec!["tc"], true, true), Plan::Install);
        assert!(matches!(plan(vec!["ip", "tc"], true, false), Plan::Skip(why)
            if why.starts_with("ip and tc not found")));
        assert!(matches!(plan(vec!["tc"], false, true), Plan::Skip(why)
            if why.contains("not root")));
    }

    #[test]
    fn a_program_is_found_on_the_path() {
        assert!(on_path("sh"));
        assert!(!on_path("racksum-no-such-program"));
    }
}
