//! `racksum sim run`.

use serde_json::Value;

use crate::files::Folder;
use crate::process::run;

const PROFILE: &str = "name = 'small'\ndevice = 'none'\ntimes = 'estimated'\n[[tensors]]\n\
                       name = 'all'\nelements = 1_000_000\nforward_us = 100\nbackward_us = 200\n\
                       update_us = 10\n";
const SCENARIO: &str = "name = 'pair'\nprofiles = ['small.toml']\n[fabric]\n\
                        layout = 'two-layers'\nracks = 2\nworkers_per_rack = 1\n\
                        gpus_per_worker = 2\ngbit = 10\n[[jobs]]\nmodel = 'small'\n\
                        iterations = 3\nworkers = [0, 1]\ncount = 2\n";

#[test]
fn a_scenario_runs_once_per_seed() {
    let folder = Folder::new("sim-run");
    let file = folder.path("pair.toml");
    std::fs::write(&file, SCENARIO).unwrap();
    std::fs::write(folder.path("small.toml"), PROFILE).unwrap();
    let args = ["sim", "run", &file, "--seeds", "3..5"];
    let table = run(&args).ok().out;
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines.len(), &lines[1][..3]), (2, &["pair", "2", "2"][..]), "{table}");
    let json = run(&[&args[..], &["--format", "json", "--threads", "1"]].concat()).ok().out;
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<_> = lines.iter().map(|line| (&line["kind"], &line["seed"])).collect();
    let [job, end] = ["job", "run"].map(Value::from);
    let [three, four] = [3, 4].map(Value::from);
    let expected = [
        (&job, &three),
        (&job, &three),
        (&end, &three),
        (&job, &four),
        (&job, &four),
        (&end, &four),
    ];
    assert_eq!(kinds, expected);
    // Two jobs that mostly send share the links.
    let inflation = lines[2]["median_inflation"].as_f64().unwrap();
    assert!((1.6..2.0).contains(&inflation), "{inflation}");
}

#[test]
fn a_scenario_that_cannot_run_is_refused_with_file_line_and_reason() {
    let folder = Folder::new("sim-run-refused");
    let file = folder.path("pair.toml");
    let refused = |text: &str| {
        std::fs::write(&file, text).unwrap();
        run(&["sim", "run", &file]).failed(2).to_owned()
    };
    assert_eq!(
        refused(SCENARIO),
        format!(
            "{file}: line 2: cannot read \"small.toml\": No such file or directory (os error 2)"
        )
    );
    std::fs::write(folder.path("small.toml"), PROFILE).unwrap();
    assert_eq!(
        refused(&SCENARIO.replace("[0, 1]", "[0, 7]")),
        format!("{file}: line 9: there is no worker 7; the last one is 1")
    );
    let slow = SCENARIO.replace("gbit = 10", "gbit = 0");
    assert_eq!(
        refused(&slow),
        format!("{file}: line 3: a rate is 0 Gbit/s; give a positive number, or \"ideal\"")
    );
    let missing = folder.path("none.toml");
    let ended = run(&["sim", "run", &missing]);
    let why = ended.failed(2);
    assert!(why.starts_with(&format!("cannot read {missing}: No such file")), "{why}");
}
