use std::net::UdpSocket;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};

use racksum_net::NetError;
use racksum_net::quic::{Credentials, frames, quinn, server};
use racksum_proto::auth::Key;
use racksum_proto::control::{FromAggregator, FromWorker};

use super::*;
use crate::join::join_by;
use crate::join::tests::welcome;
use crate::route::find_ways;

/// A fake aggregator that implements as much of the control protocol as a test needs.
struct Fake {
    name: String,
    received: Receiver<FromWorker>,
}

type Answer = fn(&FromWorker) -> Vec<FromAggregator>;

impl Fake {
    /// Starts an aggregator that serves from a thread of its own until the test ends.
    fn start(answer: Answer) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (sender, received) = channel();
        let endpoint = {
            let _guard = runtime.enter();
            let credentials = Credentials::new(None, false).unwrap();
            server("127.0.0.1:0".parse().unwrap(), &credentials).unwrap()
        };
        let name = endpoint.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            runtime.block_on(async {
                while let Some(incoming) = endpoint.accept().await {
                    let connection = incoming.await.unwrap();
                    tokio::spawn(Self::serve(connection, answer, sender.clone()));
                }
            });
        });
        Self { name, received }
    }

    async fn serve(connection: quinn::Connection, answer: Answer, sender: Sender<FromWorker>) {
        let (mut send, mut recv) = connection.accept_bi().await.unwrap();
        while let Ok(Some(message)) = frames::recv::<FromWorker>(&mut recv).await {
            let answers = match message {
                // The fake has no shards, so the proof covers no path.
                FromWorker::Prove { .. } => {
                    let (token, ip) = (Key([0; Key::LEN]), "127.0.0.1".parse().unwrap());
                    frames::send(
                        &mut send,
                        &FromAggregator::Prove { data_ports: vec![], token, ip },
                    )
                    .await
                    .unwrap();
                    continue;
                }
                ref message => answer(message),
            };
            for reply in answers {
                frames::send(&mut send, &reply).await.unwrap();
            }
            sender.send(message).unwrap();
        }
        drop(send.finish());
        connection.closed().await;
    }

    /// Returns the names of the messages received since the last call.
    fn received(&self) -> Vec<&'static str> {
        let name = |message| match message {
            FromWorker::Join(_) => "join",
            FromWorker::AskPresent(_) => "ask",
            FromWorker::Withdraw => "withdraw",
            FromWorker::Stay => "stay",
            FromWorker::Leave { .. } | FromWorker::CancelRejoin | FromWorker::Move => "leave",
            other => panic!("{other:?}"),
        };
        self.received.try_iter().map(name).collect()
    }
}

fn waiting() -> Vec<FromAggregator> {
    vec![FromAggregator::Waiting { missing: vec![1], waited_ms: 0 }]
}

fn begin() -> Vec<FromAggregator> {
    vec![FromAggregator::Welcome(welcome()), FromAggregator::Ready { multicast: false }]
}

/// Answers as an aggregator at which rank 1 waits and which refuses other ranks.
fn refusing(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::AskPresent(_) => vec![FromAggregator::Present { ranks: vec![1] }],
        FromWorker::Join(_) => vec![FromAggregator::Refused { reason: "it is full".into() }],
        _ => Vec::new(),
    }
}

/// Answers as an aggregator that has not noticed that the asking rank has left.
fn deserted(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::AskPresent(_) => vec![FromAggregator::Present { ranks: vec![0, 1] }],
        _ => Vec::new(),
    }
}

/// Answers as an aggregator without any rank of the job.
fn empty(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::AskPresent(_) => vec![FromAggregator::Present { ranks: Vec::new() }],
        _ => Vec::new(),
    }
}

/// Answers as an aggregator at which rank 1 waits and which is about to stop.
fn draining(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::Join(_) => vec![FromAggregator::Drain],
        _ => refusing(message),
    }
}

/// Answers as a full aggregator, which queues the rank.
fn full(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::Join(_) => vec![FromAggregator::Queued { before: 0, why: "full".into() }],
        FromWorker::Withdraw => vec![FromAggregator::MayLeave],
        _ => Vec::new(),
    }
}

/// Answers as an aggregator that waits for other ranks and releases a rank on request. The job
/// begins if the rank stays.
fn gathering(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::Join(_) => waiting(),
        FromWorker::Withdraw => vec![FromAggregator::MayLeave],
        FromWorker::Stay => begin(),
        _ => Vec::new(),
    }
}

/// Like [`gathering`], but the other ranks stay missing.
fn gathering_on(message: &FromWorker) -> Vec<FromAggregator> {
    if *message == FromWorker::Stay { Vec::new() } else { gathering(message) }
}

/// Answers as an aggregator that waits for other ranks, and ignores withdraw requests.
fn stuck(message: &FromWorker) -> Vec<FromAggregator> {
    if *message == FromWorker::Withdraw { Vec::new() } else { gathering_on(message) }
}

/// Answers as an aggregator whose job begins just when a rank asks to withdraw.
fn beginning(message: &FromWorker) -> Vec<FromAggregator> {
    match message {
        FromWorker::Join(_) => waiting(),
        FromWorker::Withdraw => begin(),
        _ => Vec::new(),
    }
}

/// Returns the options of rank 0 in a job of two ranks, with one aggregator and one standby set.
fn options(first: &Fake, others: &[&Fake]) -> ConnectOptions {
    let standby = others.iter().map(|fake| fake.name.clone()).collect();
    ConnectOptions {
        world: 2,
        standbys: vec![standby],
        ..ConnectOptions::new(first.name.clone(), "job")
    }
}

const LONG: Duration = Duration::from_secs(20);
/// A join timeout that expires before the rank polls a rejecting set again.
const SHORT: Duration = Duration::from_secs(3);

#[test]
fn a_rank_goes_back_to_where_others_wait_once_all_let_it_go() {
    let first = Fake::start(refusing);
    let set = [gathering; 2].map(|answer| Fake::start(answer));
    let options = options(&first, &[&set[0], &set[1]]);
    let mut selector = AggregatorSelector::new(&options, 1);
    assert!(selector.join(LONG, None, &mut Mailbox::new()).unwrap().is_none());
    assert_eq!(selector.at(), 0);
    assert!(selector.waited() < LONG);
    assert_eq!(first.received(), ["ask"]);
    for fake in set {
        assert_eq!(fake.received(), ["join", "withdraw", "leave"]);
    }
}

#[test]
fn a_rank_stays_where_its_job_begins_as_it_would_leave() {
    // wire: W-67
    let first = Fake::start(refusing);
    let set = [gathering, beginning].map(|answer: Answer| Fake::start(answer));
    let options = options(&first, &[&set[0], &set[1]]);
    let mut selector = AggregatorSelector::new(&options, 1);
    assert!(selector.join(LONG, None, &mut Mailbox::new()).unwrap().is_some());
    assert_eq!(selector.at(), 1);
    for fake in set {
        assert_eq!(fake.received(), ["join", "withdraw", "stay", "leave"]);
    }
}

#[test]
fn a_rank_stays_if_one_of_its_aggregators_does_not_let_it_go() {
    let first = Fake::start(refusing);
    let set = [gathering_on, stuck].map(|answer: Answer| Fake::start(answer));
    let options = options(&first, &[&set[0], &set[1]]);
    let mut selector = AggregatorSelector::new(&options, 1);
    let long_enough = Duration::from_millis(5_500);
    let error = selector.join(long_enough, None, &mut Mailbox::new()).unwrap_err();
    assert!(matches!(error, ConnectError::Incomplete { .. }), "{error}");
    for fake in set {
        // The rank stays, and later asks again to withdraw.
        let received = fake.received();
        assert_eq!(received[..4], ["join", "withdraw", "stay", "withdraw"], "{received:?}");
    }
}

#[test]
fn a_rank_does_not_leave_for_an_aggregator_where_others_do_not_wait() {
    for answer in [deserted, empty] {
        let (first, other) = (Fake::start(answer), Fake::start(gathering));
        let options = options(&first, &[&other]);
        let mut selector = AggregatorSelector::new(&options, 1);
        let error = selector.join(SHORT, None, &mut Mailbox::new()).unwrap_err();
        assert!(matches!(error, ConnectError::Incomplete { .. }), "{error}");
        let names = first.received();
        assert!(!names.is_empty() && names.iter().all(|message| *message == "ask"), "{names:?}");
        assert_eq!(other.received(), ["join", "leave"]);
    }
}

#[test]
fn a_rank_does_not_soon_go_back_to_one_that_would_not_have_it() {
    let (first, other) = (Fake::start(refusing), Fake::start(gathering));
    let options = options(&first, &[&other]);
    let (mut selector, mut mailbox) = (AggregatorSelector::new(&options, 1), Mailbox::new());
    assert!(selector.join(LONG, None, &mut mailbox).unwrap().is_none());
    let error = selector.join(LONG, None, &mut mailbox).unwrap_err();
    assert_eq!(error.to_string(), "the aggregator refused: it is full");
    let why = error.to_string();
    assert!(!selector.pass_over(error), "the set that the rank left comes next");
    selector.join(SHORT, None, &mut mailbox).unwrap_err();
    assert_eq!(first.received(), ["ask", "join", "leave"]);
    assert_eq!(other.received(), ["join", "withdraw", "leave", "join", "leave"]);
    assert_eq!(selector.text_of_others(), format!("; {}: {why}", first.name));
    // The rank polls the first set again later.
    assert!(selector.join(LONG, None, &mut mailbox).unwrap().is_none());
    assert_eq!(selector.at(), 0);
}

fn unresolved() -> ConnectError {
    ConnectError::Unresolved { host: "a:1".into(), why: "no such name".into() }
}

fn unanswered(seconds: u64) -> ConnectError {
    let (addr, waited) = ("192.0.2.1:1".parse().unwrap(), Span::from_secs(seconds));
    NetError::NobodyThere { addr, waited, narrow: None }.into()
}

#[test]
fn what_can_come_right_is_tried_again() {
    let sets =
        ConnectOptions { standbys: vec![vec!["b:1".into()]], ..ConnectOptions::new("a:1", "job") };
    let refused = || ConnectError::Refused("no".into());
    let cut_off = ConnectError::NoWay { to: "192.0.2.1:1".parse().unwrap(), why: "down".into() };
    let gone = ConnectError::Closed("gone".into());
    for error in [unresolved(), cut_off, unanswered(5), gone, ConnectError::Draining] {
        let mut selector = AggregatorSelector::new(&sets, 0);
        selector.pass_over(error);
        assert!(selector.pass_over(refused()), "a round is over");
        assert!(selector.may_succeed(), "the first set may still answer");
    }
    let mut selector = AggregatorSelector::new(&sets, 0);
    let other = NetError::WrongProtocol { addr: "192.0.2.1:1".parse().unwrap() };
    selector.pass_over(other.into());
    selector.pass_over(refused());
    assert!(!selector.may_succeed());
    assert!(selector.failure().to_string().ends_with("b:1: the aggregator refused: no"));
}

#[test]
fn one_that_is_back_may_take_a_rank_for_its_own_double() {
    let options = ConnectOptions::new("a:1", "job");
    let refused = || ConnectError::Refused("no".into());
    let mut selector = AggregatorSelector::new(&options, 0);
    selector.pass_over(ConnectError::Silent);
    selector.pass_over(refused());
    assert!(selector.may_succeed(), "the aggregator may not have noticed the loss yet");
    selector.sets[0].gone_at = Some(Time(0));
    assert!(!selector.may_succeed(), "the aggregator has had time to notice the loss");
    selector.pass_over(unresolved());
    selector.pass_over(refused());
    assert!(selector.may_succeed(), "the aggregator was gone again");
}

#[test]
fn of_several_tries_the_one_that_says_most_is_kept() {
    let options = ConnectOptions::new("a:1", "job");
    let last = |errors: [ConnectError; 2]| {
        let mut selector = AggregatorSelector::new(&options, 0);
        errors.into_iter().for_each(|error| assert!(selector.pass_over(error)));
        selector.failure().to_string()
    };
    let (five, one) = (unanswered(5).to_string(), unanswered(1).to_string());
    assert_eq!(last([unanswered(5), unanswered(1)]), five);
    assert_eq!(last([unresolved(), unanswered(1)]), one);
    assert_eq!(last([unanswered(1), unresolved()]), unresolved().to_string());
    let closed = || ConnectError::Closed("until then rank 1 had not joined".into());
    let since = "no answer from it since; restart it, or set another aggregator";
    assert_eq!(last([closed(), unanswered(1)]), format!("a:1: {}; {since}", closed()));
    assert_eq!(last([unanswered(1), closed()]), closed().to_string());
}

#[test]
fn only_one_that_does_not_want_a_rank_is_shunned() {
    let sets =
        ConnectOptions { standbys: vec![vec!["b:1".into()]], ..ConnectOptions::new("a:1", "job") };
    let mut selector = AggregatorSelector::new(&sets, 0);
    for error in [ConnectError::Refused("no".into()), unresolved()] {
        selector.goes_to_others = true;
        selector.pass_over(error);
    }
    let is_shunned = |set: &Set<'_>| set.shunned.is_some();
    assert_eq!([0, 1].map(|at| is_shunned(&selector.sets[at])), [true, false]);
}

/// Answers the first join as an aggregator that is about to stop, and later joins as one that
/// accepts the rank.
fn restarting(message: &FromWorker) -> Vec<FromAggregator> {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    match message {
        FromWorker::Join(_) if ASKED.fetch_add(1, SeqCst) == 0 => vec![FromAggregator::Drain],
        FromWorker::Join(_) => begin(),
        _ => Vec::new(),
    }
}

#[test]
fn the_only_aggregator_is_called_again_after_it_was_about_to_stop() {
    let only = Fake::start(restarting);
    let options = ConnectOptions { join_timeout: LONG, ..ConnectOptions::new(&only.name, "job") };
    let (at, session) = join_first(&options, &mut Mailbox::new()).unwrap();
    assert_eq!((at, session.welcomes.len()), (0, 1));
    assert_eq!(only.received(), ["join", "leave", "join"]);
}

#[test]
fn an_address_that_cannot_be_is_final_wherever_it_stands() {
    for address in ["a", "a:", "a:0", ":1", "a:b", "::1:7177", "300.1.2.3:1", "a b:1", "[a]:1"] {
        let options = ConnectOptions {
            standbys: vec![vec![address.into()]],
            ..ConnectOptions::new("192.0.2.1:1", "job")
        };
        let error = join_first(&options, &mut Mailbox::new()).unwrap_err();
        assert!(matches!(error, ConnectError::NoAddress { .. }), "{address}: {error}");
        assert!(error.is_usage() && !error.may_pass());
    }
}

#[test]
fn a_rank_that_left_a_queue_for_others_in_vain_queues_again() {
    let (first, other) = (Fake::start(full), Fake::start(refusing));
    let join_timeout = Duration::from_secs(3);
    let options = ConnectOptions { wait: true, join_timeout, ..options(&first, &[&other]) };
    let error = join_first(&options, &mut Mailbox::new()).unwrap_err();
    assert!(matches!(error, ConnectError::NoRoom { .. }), "{error}");
    let of_other = format!("; {}: the aggregator refused: it is full", other.name);
    assert!(error.to_string().ends_with(&of_other), "{error}");
    assert_eq!(first.received(), ["join", "withdraw", "leave", "join", "leave"]);
}

#[test]
fn why_nobody_was_joined_says_the_limit_that_the_user_gave() {
    let options = ConnectOptions::new("127.0.0.1:7", "job");
    let selector =
        |limit| AggregatorSelector::new(&options, 0).within(Duration::from_millis(limit));
    let addr = "127.0.0.1:7".parse().unwrap();
    let waited = Span::from_millis(2699);
    let late = || NetError::NobodyThere { addr, waited, narrow: None }.into();
    let mut long = selector(300_000);
    let warned = long.keep(late()).unwrap();
    let expected = "no answer from 127.0.0.1:7 within 2.7 s; retrying for up to ";
    assert!(warned.starts_with(expected), "{warned}");
    assert!(long.next_try().is_some());
    let error = long.failure().to_string();
    assert!(error.starts_with("no answer from 127.0.0.1:7 within 300 s; check "), "{error}");
    // If there is no time for another try, the error alone reports the failure.
    let mut short = selector(400);
    short.keep(late());
    assert!(short.next_try().is_none());
}

#[test]
fn a_warning_says_of_every_address_what_became_of_it() {
    let options = ConnectOptions::new("agg:7", "job");
    let mut selector = AggregatorSelector::new(&options, 0).within(Duration::from_secs(300));
    let nobody = |addr: &str| {
        let (addr, waited) = (addr.parse().unwrap(), Span::from_secs(5));
        ConnectError::from(NetError::NobodyThere { addr, waited, narrow: None })
    };
    let tried = vec![nobody("10.0.0.1:7"), nobody("10.0.0.2:7")];
    let warned = selector.keep(ConnectError::Named { name: "agg:7".into(), tried }).unwrap();
    let expected = "agg:7: no answer from 10.0.0.1:7 within 5 s; no answer from 10.0.0.2:7 within \
                    5 s; retrying for up to ";
    assert!(warned.starts_with(expected), "{warned}");
}

#[test]
fn no_aggregator_is_named_twice() {
    let options = ConnectOptions {
        aggregators: vec!["a:1".into(), "b:1".into()],
        standbys: vec![vec!["a:1".into(), "c:1".into()]],
        ..ConnectOptions::new("", "job")
    };
    let error = AggregatorSelector::new(&options, 0).check().unwrap_err();
    assert_eq!(error.to_string(), "the aggregator a:1 is listed twice; list each aggregator once");
    let options = ConnectOptions { standbys: vec![vec!["c:1".into(), "a:2".into()]], ..options };
    AggregatorSelector::new(&options, 0).check().unwrap();
}

#[test]
fn a_rank_goes_back_again_at_once_where_it_only_met_nobody() {
    let (first, other) = (Fake::start(draining), Fake::start(gathering));
    let options = options(&first, &[&other]);
    let (mut selector, mut mailbox) = (AggregatorSelector::new(&options, 1), Mailbox::new());
    for _ in 0..2 {
        assert!(selector.join(LONG, None, &mut mailbox).unwrap().is_none());
        let error = selector.join(LONG, None, &mut mailbox).unwrap_err();
        assert!(matches!(error, ConnectError::Draining), "{error}");
        selector.pass_over(error);
        assert!(selector.candidates().iter().all(|candidate| candidate.from == selector.began));
    }
}

#[test]
fn a_rank_that_waits_for_room_goes_to_others_wherever_they_are() {
    let (first, other) = (Fake::start(full), Fake::start(refusing));
    let options = options(&first, &[&other]);
    let mut selector = AggregatorSelector::new(&options, 0);
    assert!(selector.join(LONG, None, &mut Mailbox::new()).unwrap().is_none());
    assert_eq!(selector.at(), 1);
    assert_eq!(other.received(), ["ask"]);
    assert_eq!(first.received(), ["join", "withdraw", "leave"]);
}

#[test]
fn a_rank_that_has_come_back_looks_for_others_once_its_job_moves() {
    let (first, other) = (Fake::start(refusing), Fake::start(gathering));
    let options = ConnectOptions { rejoin: true, ..options(&first, &[&other]) };
    let mut selector = AggregatorSelector::new(&options, 1);
    selector.join(SHORT, None, &mut Mailbox::new()).unwrap_err();
    assert!(first.received().is_empty());
    let resume = Resume { first_op: racksum_proto::ids::OpId(7), absent: Vec::new() };
    assert!(selector.join(LONG, Some(&resume), &mut Mailbox::new()).unwrap().is_none());
    assert_eq!(selector.at(), 0);
}

/// Joins a job of one rank through a name that resolves to these addresses.
fn join_named(addrs: &[&str], join_timeout: Duration) -> Result<Outcome, ConnectError> {
    let hosts = ["aggregator.example:7177".to_owned()];
    let options = ConnectOptions { join_timeout, ..ConnectOptions::new(hosts[0].clone(), "job") };
    let ways = addrs.iter().map(|addr| find_ways(&[(*addr).to_owned()], None).unwrap().remove(0));
    let mut peer_poll = PeerPoll::new(&options, None, 0, Vec::new());
    join_by(&options, &hosts, ways.collect(), None, &mut peer_poll, &mut Mailbox::new())
}

#[test]
fn a_name_is_called_at_each_of_its_addresses_until_an_aggregator_answers() {
    let (silent, there) = (UdpSocket::bind("127.0.0.1:0").unwrap(), Fake::start(only_one));
    let silent = silent.local_addr().unwrap().to_string();
    let joined = join_named(&[&silent, &there.name, &silent], SHORT).unwrap();
    assert!(matches!(joined, Outcome::Complete(_)));
    assert_eq!(there.received(), ["join"]);
    // Once an aggregator has answered, the rank calls no other address.
    let (refuses, other) = (Fake::start(refusing), Fake::start(only_one));
    let error = join_named(&[&refuses.name, &other.name], SHORT).unwrap_err();
    assert_eq!(error.to_string(), "the aggregator refused: it is full");
    assert!(other.received().is_empty());
}

#[test]
fn the_error_of_a_name_has_the_name_and_all_of_its_addresses() {
    let sockets = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
    let [one, other] = sockets.each_ref().map(|socket| socket.local_addr().unwrap().to_string());
    let error = join_named(&[&one, &other], Duration::from_secs(1)).unwrap_err();
    assert!(error.may_pass() && error.is_silence() && !error.is_usage(), "{error:?}");
    let text = error.to_string();
    let expected = format!("aggregator.example:7177: no answer from {one} within ");
    assert!(text.starts_with(&expected), "{text}");
    assert!(text.contains(&format!("; no answer from {other} within ")), "{text}");
}

/// Answers as an aggregator whose job has one rank.
fn only_one(message: &FromWorker) -> Vec<FromAggregator> {
    if matches!(message, FromWorker::Join(_)) { begin() } else { Vec::new() }
}
