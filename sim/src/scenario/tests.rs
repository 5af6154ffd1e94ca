use super::*;

const PROFILE: &str = "name = 'm'\ndevice = 'd'\ntimes = 'measured'\n[[tensors]]\nname = 't'\n\
                       elements = 1000\nforward_us = 1\nbackward_us = 1\nupdate_us = 1\n";
const FABRIC: &str =
    "[fabric]\nlayout = 'two-layers'\nracks = 2\nworkers_per_rack = 2\ngbit = 10\n";
const JOB: &str = "[[jobs]]\nmodel = 'm'\niterations = 1\nworkers = [0, 3]\n";

fn parse(text: &str) -> Result<Scenario, ScenarioError> {
    Scenario::parse(text, &|file| match file {
        "m.toml" => Ok(PROFILE.into()),
        "large.toml" => Ok(PROFILE.replace("1000", "1_000_000_000_000")),
        "bad.toml" => Ok(PROFILE.replace("1000", "0")),
        "jobs.csv" => Ok("num_gpu,duration,submit_time,iterations,model\n2,1,0,x,m\n".into()),
        _ => Err("No such file or directory".into()),
    })
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

const HEAD: &str = "name = 's'\nprofiles = ['m.toml']\n";

#[test]
fn a_scenario_is_read() {
    let scenario = parse(&format!("{HEAD}{FABRIC}{JOB}count = 3\n")).unwrap();
    assert_eq!((scenario.name(), scenario.arrivals().len(), scenario.wire_bytes()), ("s", 3, 9000));
    let links = "[fabric]\nlayout = 'links'\nworkers = ['a', 'b']\nswitches = ['s']\nlinks = [\n\
                 { between = ['a', 's'], gbit = 10, back_gbit = 1 },\n\
                 { between = ['b', 's'], gbit = 'ideal' },\n]\n";
    let scenario = parse(&format!("{HEAD}{links}{}", JOB.replace('3', "1"))).unwrap();
    assert_eq!(scenario.topology.links()[1].config.rate_bps, 1_000_000_000);
}

#[test]
fn what_cannot_be_run_is_refused_with_line_and_reason() {
    for (text, expected) in [
        (format!("{HEAD}{FABRIC}"), "line 1: the scenario has no jobs; add [[jobs]] or [arrivals]"),
        (format!("{HEAD}{FABRIC}x = 1\n{JOB}"), "line 3: unknown field `x`, expected one of "),
        (
            format!("name = 's'\nprofiles = ['m.toml', 'n.toml']\n{FABRIC}{JOB}"),
            "line 2: cannot read \"n.toml\": No such file or directory",
        ),
        (
            format!("name = 's'\nprofiles = ['bad.toml']\n{FABRIC}{JOB}"),
            "line 2: bad.toml: line 4: ",
        ),
        (
            format!("name = 's'\nprofiles = ['m.toml', 'm.toml']\n{FABRIC}{JOB}"),
            "line 2: two profiles are named \"m\"; name each model once",
        ),
        (
            format!("{HEAD}{FABRIC}{}", JOB.replace("'m'", "'x'")),
            "line 8: there is no profile of model \"x\"; the profiles are m",
        ),
        (
            format!("{HEAD}{FABRIC}{}", JOB.replace("[0, 3]", "[0, 4]")),
            "line 8: there is no worker 4; the last one is 3",
        ),
        (
            format!("{HEAD}{FABRIC}{}", JOB.replace("[0, 3]", "[1, 1]")),
            "line 8: worker 1 is there twice",
        ),
        (format!("{HEAD}{FABRIC}{JOB}gpus = 2\n"), "line 8: give the job `workers` or `gpus`"),
        (
            format!("{HEAD}{FABRIC}{JOB}[[jobs]]\nmodel = 'm'\niterations = 1\ngpus = 2\n"),
            "line 12: either all jobs have `workers`, or none has",
        ),
        (
            format!("{HEAD}{FABRIC}[[jobs]]\nmodel = 'm'\niterations = 1\ngpus = 2\n"),
            "line 1: the jobs have no workers; add [placement]",
        ),
        (
            format!("{HEAD}{FABRIC}{JOB}[placement]\npolicy = 'random'\n"),
            "line 12: the jobs have workers already; remove [placement]",
        ),
        (
            format!("{HEAD}{}{JOB}", FABRIC.replace("10", "0")),
            "line 3: a rate is 0 Gbit/s; give a positive number, or \"ideal\"",
        ),
        (
            format!("{HEAD}{}{JOB}", FABRIC.replace("racks = 2", "racks = 0")),
            "line 3: the fabric has no workers",
        ),
        (
            format!(
                "{HEAD}{FABRIC}[transport]\nkind = 'reference'\nmtu = 100\nelements = 5\n{JOB}"
            ),
            "line 8: packets of 100 bytes on the wire do not hold 5 elements and 82 bytes of ",
        ),
        (
            format!("{HEAD}{}{JOB}", FABRIC.replace("racks = 2", "racks = 9223372036854775807")),
            "line 3: the fabric has more than 65000 nodes",
        ),
        (
            format!("{HEAD}{FABRIC}{JOB}count = 4_000_000_000\n"),
            "line 8: the scenario has more than 1000000 jobs",
        ),
        (
            format!(
                "name = 's'\nprofiles = ['large.toml']\n{FABRIC}\
                 [transport]\nkind = 'reference'\nelements = 1\n{JOB}"
            ),
            "line 1: tensor \"t\" of model \"m\" takes 2^32 packets or more; use larger packets",
        ),
        (
            format!("{HEAD}{FABRIC}[schedule]\ncompress = 'low-priority'\n{JOB}"),
            "line 8: `compress = \"low-priority\"` needs a schedule with priorities: \"sincronia\"",
        ),
        (
            format!(
                "{HEAD}{FABRIC}[arrivals]\nfile = 'jobs.csv'\nformat = 'coinnetflow'\n\
                 iterations = 'column'\n[placement]\npolicy = 'random'\n"
            ),
            "line 8: jobs.csv: line 2: ",
        ),
        (
            format!(
                "{HEAD}[fabric]\nlayout = 'links'\nworkers = ['a', 'b']\nswitches = ['s']\n\
                 links = [{{ between = ['a', 's'], gbit = 10 }}]\n{JOB}"
            ),
            "line 3: no switch is above all workers: \"a\" and \"b\" have none in common",
        ),
    ] {
        let error = error(&text);
        assert!(error.starts_with(expected), "{error}\nexpected {expected}");
    }
}
