//! Tests of arrivals.

use proptest::prelude::*;

use super::*;
use crate::workload::shared_data;

const TRACE: &str = "num_gpu,duration,submit_time,iterations,model
8,30,120,52,vgg11
2,10,0,19,inception4
4,1,0.5,1,vgg11
";

fn options(iterations: Iterations) -> Options {
    let profiles = ["vgg11", "inception"].map(str::to_owned);
    let mut options = Options::new(iterations, profiles);
    let models = coinnetflow::INCEPTION.map(|model| (model.to_owned(), "inception".to_owned()));
    options.models = models.into();
    options
}

/// Returns the numbers, submission times in milliseconds, GPUs, iterations and models.
fn summary(arrivals: &[Arrival]) -> Vec<(u64, u64, u32, u64, &str)> {
    let summary = arrivals.iter().map(|arrival| {
        let Arrival { job, submitted, gpus, iterations, model, .. } = arrival;
        (job.0, submitted.as_micros() / 1000, gpus.get(), iterations.get(), model.as_str())
    });
    summary.collect()
}

fn error(text: &str, options: &Options) -> String {
    coinnetflow::read(text, options).unwrap_err().to_string()
}

#[test]
fn jobs_are_numbered_by_their_submission() {
    let arrivals = coinnetflow::read(TRACE, &options(Iterations::Column)).unwrap();
    let expected =
        [(0, 0, 2, 19, "inception"), (1, 500, 4, 1, "vgg11"), (2, 120_000, 8, 52, "vgg11")];
    assert_eq!(summary(&arrivals), expected);
    assert_eq!(arrivals[0].name, "inception4");
}

#[test]
fn jobs_submitted_at_once_keep_the_order_of_the_file() {
    let text = "model,submit_time,num_gpu\nvgg11,7,1\ninception,7,2\nvgg11,7,3\nvgg11,6,4\n";
    let options = options(Iterations::Fixed(NonZeroU64::MIN));
    let gpus: Vec<_> =
        coinnetflow::read(text, &options).unwrap().iter().map(|it| it.gpus.get()).collect();
    assert_eq!(gpus, [4, 1, 2, 3]);
}

#[test]
fn options_scale_and_shorten_a_trace() {
    let mut options = options(Iterations::Column);
    options.submit_all_at_start = true;
    options.iteration_factor = NonZeroU64::new(20).unwrap();
    options.gpu_factor = NonZeroU32::new(3).unwrap();
    options.max_jobs = Some(2);
    let arrivals = coinnetflow::read(TRACE, &options).unwrap();
    // The first two rows, still in the order of their submission.
    assert_eq!(summary(&arrivals), [(0, 0, 6, 1, "inception"), (1, 0, 24, 2, "vgg11")]);
    options.max_jobs = Some(0);
    assert!(error(TRACE, &options).contains("the file has no jobs"));
}

#[test]
fn the_caller_chooses_where_iterations_come_from() {
    let iterations = |rule| -> Vec<u64> {
        let arrivals = coinnetflow::read(TRACE, &options(rule)).unwrap();
        arrivals.iter().map(|arrival| arrival.iterations.get()).collect()
    };
    assert_eq!(iterations(Iterations::PerSecond(2.0)), [20, 2, 60]);
    assert_eq!(iterations(Iterations::PerSecond(0.01)), [1, 1, 1]);
    assert_eq!(iterations(Iterations::Fixed(NonZeroU64::new(7).unwrap())), [7, 7, 7]);
    let per_model = [("vgg11", 5), ("inception4", 6)]
        .map(|(model, it)| (model.to_owned(), NonZeroU64::new(it).unwrap()));
    assert_eq!(iterations(Iterations::PerModel(per_model.clone().into())), [6, 5, 5]);
    let vgg11_alone = Iterations::PerModel(per_model[..1].iter().cloned().collect());
    assert_eq!(
        error(TRACE, &options(vgg11_alone)),
        "line 3: model \"inception4\" has no number in `iterations`; add it"
    );
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = error(TRACE, &options(Iterations::PerSecond(rate)));
        assert!(error.starts_with("line 2: the rule in `iterations` has rate"), "{error}");
    }
    let error = error(TRACE, &options(Iterations::PerSecond(1e300)));
    assert!(error.starts_with("line 2: the job would have more iterations"), "{error}");
}

#[test]
fn a_malformed_row_is_refused_with_its_line() {
    let options = options(Iterations::Column);
    for (row, reason) in [
        ("0,1,2,3,vgg11", "num_gpu is \"0\"; it must be a whole number of 1 or more"),
        ("-2,1,2,3,vgg11", "num_gpu is \"-2\""),
        ("4294967296,1,2,3,vgg11", "num_gpu is \"4294967296\""),
        ("1.5,1,2,3,vgg11", "num_gpu is \"1.5\""),
        (",1,2,3,vgg11", "num_gpu is \"\""),
        ("2,1,-2,3,vgg11", "submit_time: -2 is negative"),
        ("2,1,nan,3,vgg11", "submit_time: NaN is not a finite number"),
        ("2,1,soon,3,vgg11", "submit_time is \"soon\"; it must be a number of seconds"),
        ("2,1,1e20,3,vgg11", "submit_time: the duration is above the limit"),
        ("2,1,99999999999,3,vgg11", "submit_time: the duration is above the limit"),
        ("2,x,2,3,vgg11", "duration is \"x\""),
        ("2,1,2,3.5,vgg11", "iterations is \"3.5\"; it must be a whole number"),
        ("2,1,2,3,", "model is \"\"; it must be a name"),
        ("2,1,2,3,gpt", "model \"gpt\" has no profile \"gpt\"; add it, or map the model"),
        ("2,1,2,3", "the row has 4 fields, but there are 5 columns"),
        ("2,1,2,3,vgg11,6", "the row has 6 fields, but there are 5 columns"),
    ] {
        let error = error(&format!("{TRACE}{row}\n1,1,1,1,vgg11\n"), &options);
        assert!(error.starts_with(&format!("line 5: {reason}")), "{row}: {error}");
    }
}

#[test]
fn lines_are_counted_over_blank_lines_and_carriage_returns() {
    let text = format!("{}\r\n\r\n2,1,2,3,gpt\r\n", TRACE.replace('\n', "\r\n"));
    let error = error(&text, &options(Iterations::Column));
    assert!(error.starts_with("line 7: model \"gpt\""), "{error}");
}

#[test]
fn a_malformed_header_is_refused() {
    let options = options(Iterations::Column);
    for (header, reason) in [
        ("num_gpu,duration,submit_time,iterations", "line 1: column model is missing"),
        (
            "num_gpu,duration,submit_time,iterations,model,user",
            "line 1: column \"user\" is unknown",
        ),
        ("num_gpu,num_gpu,submit_time,iterations,model", "line 1: column num_gpu is there twice"),
        ("", "line 1: the file has no jobs"),
    ] {
        let columns = header.split(',').count();
        let row = ["1", "1", "1", "1", "vgg11", "me"][..columns].join(",");
        let text = if header.is_empty() { String::new() } else { format!("{header}\n{row}\n") };
        let error = error(&text, &options);
        assert!(error.starts_with(reason), "{header}: {error}");
    }
    let without = "num_gpu,submit_time,model\n1,1,vgg11\n";
    assert_eq!(
        error(without, &options),
        "line 1: column iterations is missing, which the rule in `iterations` needs; choose \
         another rule"
    );
    let per_second = self::options(Iterations::PerSecond(2.0));
    assert!(error(without, &per_second).contains("column duration is missing"));
}

#[test]
fn too_many_gpus_are_refused() {
    let mut options = options(Iterations::Column);
    options.gpu_factor = NonZeroU32::MAX;
    let error = error(TRACE, &options);
    assert!(error.starts_with("line 2: the job would have more GPUs"), "{error}");
}

#[test]
fn repeated_arrivals_cycle_through_their_models() {
    let gpus = NonZeroU32::new(2).unwrap();
    let iterations = NonZeroU64::new(10).unwrap();
    let arrivals = repeated(&["bert", "vgg11"], 3, gpus, iterations, Picos::from_millis(5));
    let expected = [(1, 0, 2, 10, "bert"), (2, 5, 2, 10, "vgg11"), (3, 10, 2, 10, "bert")];
    assert_eq!(summary(&arrivals), expected);
    assert_eq!(repeated(&[], 3, gpus, iterations, Picos::ZERO), []);
}

#[test]
fn a_pollux_workload_needs_a_rule_without_durations() {
    let text = "name,time,application,num_replicas,batch_size\ncifar10-0,107,cifar10,6,2048\n";
    let fixed = Iterations::Fixed(NonZeroU64::new(9).unwrap());
    let mut options = Options::new(fixed, ["resnet50".to_owned()]);
    assert!(pollux::read(text, &options).unwrap_err().to_string().starts_with("line 2: model"));
    options.models = [("cifar10".to_owned(), "resnet50".to_owned())].into();
    let arrivals = pollux::read(text, &options).unwrap();
    assert_eq!(summary(&arrivals), [(0, 107_000, 6, 9, "resnet50")]);
    assert_eq!(arrivals[0].name, "cifar10-0");
    for rule in [Iterations::Column, Iterations::PerSecond(1.0)] {
        options.iterations = rule;
        let error = pollux::read(text, &options).unwrap_err();
        assert!(matches!(error.kind, ArrivalErrorKind::MissingSource(_)), "{error}");
    }
}

#[test]
fn the_workloads_of_pollux_are_read() {
    let Some(folder) = shared_data::path("pollux/workloads") else { return };
    let applications = ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"];
    let fixed = Iterations::Fixed(NonZeroU64::MIN);
    let options = Options::new(fixed, applications.map(str::to_owned));
    for number in 1..=8 {
        let text = std::fs::read_to_string(folder.join(format!("workload-{number}.csv"))).unwrap();
        let arrivals = pollux::read(&text, &options).unwrap();
        assert_eq!(arrivals.len(), 160);
        assert!(arrivals.is_sorted_by_key(|arrival| (arrival.submitted, arrival.job)));
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "(?s).{0,200}", header in any::<bool>()) {
        let header = if header { "num_gpu,submit_time,model\n" } else { "" };
        let options = options(Iterations::Fixed(NonZeroU64::MIN));
        let read = coinnetflow::read(&format!("{header}{text}"), &options);
        prop_assert!(read.is_ok() || read.unwrap_err().line > 0);
    }

    #[test]
    fn arrivals_keep_every_row(rows in prop::collection::vec((1..9_u32, 0..5_u32), 1..20)) {
        let lines = rows.iter().map(|(gpus, time)| format!("{gpus},{time},vgg11\n"));
        let text = format!("num_gpu,submit_time,model\n{}", lines.collect::<String>());
        let arrivals =
            coinnetflow::read(&text, &options(Iterations::Fixed(NonZeroU64::MIN))).unwrap();
        let mut sorted = rows;
        sorted.sort_by_key(|(_, time)| *time);
        let read: Vec<_> = summary(&arrivals).iter().map(|it| (it.2, it.1 / 1000)).collect();
        let sorted: Vec<_> = sorted.iter().map(|(gpus, time)| (*gpus, u64::from(*time))).collect();
        prop_assert_eq!(read, sorted);
    }
}
