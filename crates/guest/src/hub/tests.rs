use super::*;
use wire::{Decoder, guest::PROTOCOL};

fn greeting() -> HelloReply {
    HelloReply {
        protocol: PROTOCOL,
        guest_version: "test".into(),
        boot_id: "boot".into(),
        sending: vec![],
        receiving: vec![],
        works: vec![],
        max_stream: 0,
        reset: Default::default(),
    }
}

fn connect(hub: &mut Hub, acks: Vec<StreamAt>) {
    hub.hello(greeting(), false, false);
    frames(hub);
    hub.ready(acks);
}

fn frames(hub: &mut Hub) -> Vec<Frame> {
    let mut out = BytesMut::new();
    hub.fill(&mut out);
    let mut decoder = Decoder::new();
    if !out.starts_with(&PREAMBLE) {
        decoder.push(&PREAMBLE);
    }
    decoder.push(&out);
    std::iter::from_fn(|| decoder.next_frame().unwrap()).collect()
}

fn open() -> Hub {
    let mut hub = Hub::new();
    connect(&mut hub, vec![]);
    hub
}

#[test]
fn what_is_not_acknowledged_is_sent_again_after_a_hello() {
    let mut hub = open();
    assert!(hub.open_sending(StreamId(1), Role::Transfer) && hub.open_sending(StreamId(2), stdout()));
    hub.take_in(StreamId(2), b"abcdef");
    assert_eq!(frames(&mut hub).len(), 1);
    connect(&mut hub, vec![StreamAt { stream: StreamId(2), offset: Offset(2) }]);
    let again = Frame::Data { stream: StreamId(2), offset: Offset(2), bytes: Bytes::from_static(b"cdef") };
    assert_eq!(frames(&mut hub), vec![again]);
    assert!(hub.room(StreamId(1)).is_none(), "a transfer ends with its connection");
}

#[test]
fn streams_take_turns() {
    let mut hub = open();
    for id in [1, 2] {
        assert!(hub.open_sending(StreamId(id), stdout()));
    }
    hub.take_in(StreamId(1), &vec![0; 2 * MAX_DATA]);
    hub.take_in(StreamId(2), b"small");
    let order: Vec<u32> =
        frames(&mut hub).iter().map(|f| if let Frame::Data { stream, .. } = f { stream.0 } else { 0 }).collect();
    assert_eq!(order, [1, 2, 1]);
}

#[test]
fn after_quiesced_there_is_silence() {
    let mut hub = open();
    assert!(hub.open_sending(StreamId(1), stdout()));
    hub.reply(hub.epoch(), 7, Ok(Reply::Pong));
    hub.quiesce();
    let said = frames(&mut hub);
    assert_eq!(said.len(), 2, "the reply that was due, then Quiesced");
    hub.take_in(StreamId(1), b"later");
    hub.event(GuestEvent::Unsaveable { items: vec![] });
    assert!(frames(&mut hub).is_empty());
    connect(&mut hub, vec![]);
    assert_eq!(frames(&mut hub).len(), 2, "the event and the bytes come after the next Hello");
}

#[test]
fn input_that_was_not_used_up_is_asked_for_again() {
    let mut hub = open();
    assert!(hub.open_receiving(StreamId(4), Role::Stdin(work())));
    hub.on_data(StreamId(4), Offset(0), Bytes::from_static(b"abc"));
    hub.on_data(StreamId(4), Offset(3), Bytes::from_static(b"def"));
    assert_eq!(hub.next(StreamId(4)), Next::Bytes(Bytes::from_static(b"abc")));
    connect(&mut hub, vec![]);
    hub.consumed(StreamId(4), 3);
    hub.on_data(StreamId(4), Offset(3), Bytes::from_static(b"def"));
    hub.on_end(StreamId(4), Offset(6));
    assert_eq!(hub.next(StreamId(4)), Next::Bytes(Bytes::from_static(b"def")));
    assert_eq!(hub.next(StreamId(4)), Next::End);
    assert_eq!(frames(&mut hub), vec![Frame::Ack { stream: StreamId(4), offset: Offset(3) }]);
}

#[test]
fn input_whose_sender_is_gone_is_kept_for_good() {
    let mut hub = open();
    for id in [4, 5] {
        assert!(hub.open_receiving(StreamId(id), Role::Stdin(work())));
        hub.on_data(StreamId(id), Offset(0), Bytes::from_static(b"abc"));
    }
    hub.on_end(StreamId(4), Offset(3));
    assert_eq!(hub.next(StreamId(5)), Next::Bytes(Bytes::from_static(b"abc")));
    hub.on_data(StreamId(5), Offset(3), Bytes::from_static(b"def"));
    hub.hello(greeting(), true, true);
    let said = frames(&mut hub);
    let Some(Frame::Control(json)) = said.first() else { panic!("{said:?}") };
    let Ok(FromGuest::HelloReply(reply)) = wire::frame::parse_control(json) else { panic!("{said:?}") };
    let told: Vec<_> = reply.receiving.iter().map(|r| (r.stream.0, r.received, r.ended)).collect();
    assert_eq!(told, [(4, Offset(3), true), (5, Offset(6), false)]);
    hub.ready(vec![]);
    hub.on_data(StreamId(5), Offset(6), Bytes::from_static(b"ghi"));
    // The next connection's sender sends its own again, and nothing of what it never had.
    connect(&mut hub, vec![]);
    hub.on_data(StreamId(5), Offset(6), Bytes::from_static(b"ghi"));
    hub.consumed(StreamId(5), 3);
    assert!(frames(&mut hub).is_empty(), "what counts as acknowledged is not acknowledged again");
    for (id, text) in [(4, "abc"), (5, "def"), (5, "ghi")] {
        assert_eq!(hub.next(StreamId(id)), Next::Bytes(Bytes::from(text)));
        hub.consumed(StreamId(id), 3);
    }
    assert_eq!(hub.next(StreamId(4)), Next::End);
    assert_eq!(hub.next(StreamId(5)), Next::Nothing);
    let acks = [(4, 3), (5, 9)].map(|(id, offset)| Frame::Ack { stream: StreamId(id), offset: Offset(offset) });
    assert_eq!(frames(&mut hub), acks);
}

#[test]
fn a_hole_or_too_much_resets_the_stream_and_nothing_else() {
    let mut hub = open();
    for id in [4, 5] {
        assert!(hub.open_receiving(StreamId(id), Role::Stdin(work())));
    }
    hub.on_data(StreamId(4), Offset(9), Bytes::from_static(b"x"));
    assert_eq!(hub.next(StreamId(4)), Next::Gone);
    for n in 0..(WINDOW / MAX_DATA) as u64 + 2 {
        hub.on_data(StreamId(5), Offset(n * MAX_DATA as u64), Bytes::from(vec![0; MAX_DATA]));
    }
    assert_eq!(hub.next(StreamId(5)), Next::Gone);
    assert_eq!(frames(&mut hub).iter().filter(|f| matches!(f, Frame::Reset { .. })).count(), 2);
}

#[test]
fn a_reply_to_an_earlier_connection_is_dropped() {
    let mut hub = open();
    let before = hub.epoch();
    connect(&mut hub, vec![]);
    hub.reply(before, 1, Ok(Reply::Done));
    assert!(frames(&mut hub).is_empty());
}

fn work() -> wire::guest::Work {
    wire::guest::Work::Exec(model::ExecId::new())
}

fn stdout() -> Role {
    Role::Stdout(work())
}

#[test]
fn a_connection_goes_on_through_a_capture_and_ends_with_its_generation() {
    let mut hub = open();
    let id = hub.dial(Dial::Proxy);
    hub.take_in(id, b"hello");
    let asked = frames(&mut hub);
    assert!(matches!(&asked[0], Frame::Control(json) if json.windows(6).any(|w| w == b"\"dial\"")), "{asked:?}");
    assert!(matches!(asked[1], Frame::Data { stream, .. } if stream == id));
    hub.on_data(id, Offset(0), Bytes::from_static(b"world"));
    hub.quiesce();
    frames(&mut hub);
    let unsaid = hub.dial(Dial::To { host: "a".into(), port: 1 });
    let given_up = hub.dial(Dial::Proxy);
    hub.on_reset(given_up);
    connect(&mut hub, vec![StreamAt { stream: id, offset: Offset(5) }]);
    hub.on_data(id, Offset(0), Bytes::from_static(b"world"));
    assert_eq!(hub.next(id), Next::Bytes(Bytes::from_static(b"world")));
    let said = frames(&mut hub);
    assert!(matches!(said[0], Frame::Control(_)), "what could not be said before is said now");
    assert_eq!(
        said[1..],
        [Frame::Ack { stream: id, offset: Offset(0) }],
        "what comes again is acknowledged as far as it was used"
    );
    // What is in flight through another greeting is not acknowledged twice, nor before it was used.
    hub.hello(greeting(), false, false);
    let Some(Frame::Control(json)) = frames(&mut hub).into_iter().next() else { panic!("no answer") };
    let Ok(FromGuest::HelloReply(reply)) = wire::frame::parse_control(&json) else { panic!("no answer") };
    assert_eq!(reply.receiving.iter().find(|r| r.stream == id).map(|r| r.received), Some(Offset(0)));
    hub.ready(vec![]);
    hub.on_data(id, Offset(0), Bytes::from_static(b"world!"));
    hub.consumed(id, 5);
    assert_eq!(hub.next(id), Next::Bytes(Bytes::from_static(b"!")));
    hub.consumed(id, 1);
    assert!(frames(&mut hub).contains(&Frame::Ack { stream: id, offset: Offset(6) }));
    let wished = hub.dial(Dial::Proxy);
    hub.reset(wished, "not any more");
    hub.hello(greeting(), false, true);
    for id in [id, unsaid, wished] {
        assert!(hub.room(id).is_none() && hub.next(id) == Next::Gone);
    }
    frames(&mut hub);
    hub.ready(vec![]);
    assert!(frames(&mut hub).is_empty());
    assert!(hub.dial(Dial::Proxy).0 > unsaid.0, "numbers are not used again");
    assert!(hub.open_connection(StreamId(9)) && !hub.open_connection(StreamId(9)));
}
