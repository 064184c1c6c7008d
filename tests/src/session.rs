//! A session, as a client of the HTTP interface holds it.

use crate::{
    eventually,
    http::{Client, Reply, query},
};
use serde_json::{Value, json};

/// A session that a test made.
#[derive(Clone)]
pub struct Session {
    pub client: Client,
    pub id: String,
}

/// An exec that has ended.
#[derive(Debug)]
pub struct Exec {
    pub id: String,
    pub code: Option<i64>,
    pub stdout: String,
    pub stderr: String,
    pub json: Value,
}

impl Session {
    pub fn new(client: Client, json: &Value) -> Session {
        Session { client, id: json["id"].as_str().expect("a session has an id").to_owned() }
    }

    /// The same session on a server that was started again.
    pub fn on(&self, client: &Client) -> Session {
        Session { client: client.clone(), id: self.id.clone() }
    }

    pub fn path(&self, rest: &str) -> String {
        format!("/v1/sessions/{}{rest}", self.id)
    }

    #[track_caller]
    pub fn show(&self) -> Value {
        self.client.get(&self.path("")).expect(200).json()
    }

    #[track_caller]
    pub fn state(&self) -> String {
        self.show()["state"].as_str().expect("a state").to_owned()
    }

    #[track_caller]
    pub fn exec_with(&self, body: &Value) -> Exec {
        let json = self.client.post(&self.path("/execs?wait=true"), body).expect(201).json();
        let text = |name: &str| json[name].as_str().unwrap_or_default().to_owned();
        Exec { id: text("id"), code: json["exit_code"].as_i64(), stdout: text("stdout"), stderr: text("stderr"), json }
    }

    /// Runs a shell command to its end.
    #[track_caller]
    pub fn sh(&self, command: &str) -> Exec {
        self.exec_with(&json!({ "shell": command }))
    }

    /// What a shell command prints; it must succeed.
    #[track_caller]
    pub fn out(&self, command: &str) -> String {
        let exec = self.sh(command);
        assert_eq!(exec.code, Some(0), "{command}: {}{}", exec.stdout, exec.stderr);
        exec.stdout.trim_end().to_owned()
    }

    /// Starts a shell command and returns its exec's id.
    #[track_caller]
    pub fn start_sh(&self, command: &str) -> String {
        let json = self.client.post(&self.path("/execs"), &json!({ "shell": command })).expect(201).json();
        json["id"].as_str().expect("an exec has an id").to_owned()
    }

    #[track_caller]
    pub fn exec(&self, id: &str) -> Value {
        self.client.get(&self.path(&format!("/execs/{id}"))).expect(200).json()
    }

    /// Waits until an exec has ended.
    #[track_caller]
    pub fn ended(&self, id: &str) -> Value {
        eventually("the exec ends", || Some(self.exec(id)).filter(|exec| exec["state"] != "running"))
    }

    /// All bytes that an exec has written so far.
    #[track_caller]
    pub fn output(&self, id: &str, stream: &str) -> Vec<u8> {
        let path = self.path(&format!("/execs/{id}/output?stream={stream}&from=0"));
        let reply = self.client.send("GET", &path, &[("accept", "application/octet-stream")], None).expect("an answer");
        reply.expect(200).body
    }

    /// A lifecycle call: hibernate, wake, pause, unpause, stop, start.
    #[track_caller]
    pub fn call(&self, what: &str) -> Reply {
        self.client.post(&self.path(&format!("/{what}")), &json!({}))
    }

    #[track_caller]
    pub fn hibernate(&self) -> Value {
        let session = self.call("hibernate").expect(200).json();
        assert_eq!(session["state"], "hibernated", "{session}");
        session
    }

    #[track_caller]
    pub fn wake(&self) -> Value {
        let session = self.call("wake").expect(200).json();
        assert_eq!(session["state"], "running", "{session}");
        session
    }

    #[track_caller]
    pub fn delete(&self) {
        self.client.delete(&self.path("")).expect(204);
    }

    #[track_caller]
    pub fn read_file(&self, path: &str) -> Reply {
        self.client.get(&self.path(&format!("/files?path={}", query(path))))
    }

    #[track_caller]
    pub fn write_file(&self, path: &str, bytes: &[u8]) -> Reply {
        self.client.put(&self.path(&format!("/files?path={}", query(path))), bytes)
    }

    /// All events so far.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        let (mut all, mut from) = (Vec::new(), 1);
        loop {
            let page = self.client.get(&self.path(&format!("/events?from={from}&limit=1000"))).expect(200).json();
            let items = page["items"].as_array().expect("a list").clone();
            let Some(last) = items.last() else { return all };
            from = last["seq"].as_u64().expect("a number") + 1;
            all.extend(items);
        }
    }

    /// Waits for an event of a type.
    #[track_caller]
    pub fn event(&self, kind: &str) -> Value {
        eventually(&format!("the event {kind}"), || self.events().into_iter().rev().find(|event| event["type"] == kind))
    }
}
