use super::*;

fn image_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("checkpoint.img"), "state").unwrap();
    fs::write(dir.path().join("pages.img"), vec![0u8; (HASHED_MAX + 1) as usize]).unwrap();
    dir
}

fn facts(session_id: SessionId) -> ImageFacts {
    let (guest_hash, template_hash) = (Hash::of(b"guest"), Hash::of(b"template"));
    ImageFacts {
        session_id,
        generation: Generation::FIRST,
        runsc_hash: Hash::of(b"runsc"),
        runsc_version: "release-20240729.0".into(),
        guest_hash,
        template_hash,
        memory_bytes: ByteSize(1 << 20),
        disk_fingerprint: Some(Hash::of(b"disk")),
        lower: vec![LowerLayer::Guest(guest_hash), LowerLayer::Template(template_hash)],
    }
}

fn written() -> (tempfile::TempDir, ImageDescriptor) {
    let dir = image_dir();
    let image = ImageDescriptor::describe(dir.path(), facts(SessionId::new())).unwrap();
    image.write(dir.path()).unwrap();
    (dir, image)
}

#[test]
fn an_image_reads_back_and_can_be_described_again() {
    let (dir, image) = written();
    assert_eq!(ImageDescriptor::read(dir.path()).unwrap(), image);
    let names: Vec<_> = image.files.iter().map(|f| (f.name.as_str(), f.blake3.is_some())).collect();
    assert_eq!(names, [("checkpoint.img", true), ("pages.img", false)]);
    // It is JSON for everybody else.
    let value: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join(FILE)).unwrap()).unwrap();
    assert_eq!(value["body"]["magic"], MAGIC);
    let again = ImageDescriptor::describe(dir.path(), facts(image.session_id)).unwrap();
    assert_eq!(again.files, image.files);
}

#[test]
fn an_unfinished_image_is_missing() {
    let dir = image_dir();
    assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Missing(_))));
    assert!(matches!(ImageDescriptor::read(&dir.path().join("nowhere")), Err(ImageError::Missing(_))));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(ImageDescriptor::describe(empty.path(), facts(SessionId::new())), Err(ImageError::Damaged { .. })));
}

#[test]
fn damage_anywhere_is_found_and_named() {
    type Spoil<'a> = (&'a str, &'a dyn Fn(&Path));
    let cases: [Spoil; 6] = [
        ("pages.img has", &|d| fs::write(d.join("pages.img"), "short").unwrap()),
        ("pages.img is missing", &|d| fs::remove_file(d.join("pages.img")).unwrap()),
        ("another content", &|d| fs::write(d.join("checkpoint.img"), "stale").unwrap()),
        ("no plain file", &|d| {
            fs::remove_file(d.join("checkpoint.img")).unwrap();
            fs::create_dir(d.join("checkpoint.img")).unwrap();
        }),
        ("too long", &|d| fs::write(d.join(FILE), vec![b' '; DESCRIPTOR_MAX as usize + 1]).unwrap()),
        ("it names the file", &|d| {
            let mut image = ImageDescriptor::read(d).unwrap();
            image.files[0].name = "../x".into();
            fs::write(d.join(FILE), enclose(&serde_json::to_string(&image).unwrap())).unwrap();
        }),
    ];
    for (part, spoil) in cases {
        let (dir, _) = written();
        spoil(dir.path());
        let error = ImageDescriptor::read(dir.path()).unwrap_err();
        assert!(matches!(&error, ImageError::Damaged { what, .. } if what.contains(part)), "{part}: {error}");
    }
}

#[test]
fn no_single_changed_byte_of_the_descriptor_gets_through() {
    let (dir, _) = written();
    let good = fs::read(dir.path().join(FILE)).unwrap();
    for n in 0..good.len() {
        let mut bad = good.clone();
        bad[n] ^= 1;
        assert!(disclose(&bad).is_none(), "byte {n}");
        assert!(disclose(&good[..n]).is_none(), "cut at {n}");
    }
    assert!(disclose(&good).is_some());
}

#[test]
fn a_newer_format_is_told_from_damage() {
    let (dir, _) = written();
    let put = |body: &str| fs::write(dir.path().join(FILE), enclose(body)).unwrap();
    put(r#"{"magic":"dormouse-image","format_version":2,"files":"elsewhere"}"#);
    assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Newer { version: 2, .. })));
    for body in [
        "{}",
        "[]",
        r#"{"magic":"other","format_version":2}"#,
        r#"{"magic":"dormouse-image"}"#,
        r#"{"magic":"dormouse-image","format_version":1}"#,
    ] {
        put(body);
        assert!(matches!(ImageDescriptor::read(dir.path()), Err(ImageError::Damaged { .. })), "{body}");
    }
}

#[test]
fn a_file_that_changed_since_it_was_described_is_not_committed() {
    let dir = image_dir();
    let image = ImageDescriptor::describe(dir.path(), facts(SessionId::new())).unwrap();
    fs::write(dir.path().join("pages.img"), "short").unwrap();
    assert!(matches!(image.write(dir.path()), Err(ImageError::Damaged { .. })));
    assert!(!dir.path().join(FILE).exists());
}

#[test]
fn an_image_says_what_it_lacks_here() {
    let dir = tempfile::tempdir().unwrap();
    let (binaries, templates) =
        (BinaryStore::open(dir.path().join("b")).unwrap(), TemplateStore::open(dir.path().join("t")).unwrap());
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    let template_hash = templates.add_dir("x", &source).unwrap().hash;
    let images = image_dir();
    let lower = vec![LowerLayer::Guest(Hash::of(b"guest")), LowerLayer::Template(template_hash)];
    let image = ImageDescriptor::describe(images.path(), ImageFacts { template_hash, lower, ..facts(SessionId::new()) }).unwrap();
    let features = cpu_features().unwrap();
    let here =
        Here { cpu_features: &features, binaries: &binaries, templates: &templates, disk_fingerprint: Some(Hash::of(b"disk")) };

    assert!(matches!(image.check_loadable(&here), Err(WhyNot::NoRuntime { .. })));
    binaries.ensure_bytes("runsc", b"runsc").unwrap();
    assert_eq!(image.check_loadable(&here), Err(WhyNot::NoGuest(image.guest_hash)));
    binaries.guest_layer(b"guest").unwrap();
    assert_eq!(image.check_loadable(&here), Ok(()));
    assert_eq!(image.check_loadable(&Here { disk_fingerprint: Some(Hash::of(b"later")), ..here }), Err(WhyNot::OtherDisk));
    assert_eq!(image.check_loadable(&Here { disk_fingerprint: None, ..here }), Ok(()));
    let mut other = ImageDescriptor { cpu_features: vec!["avx9000".into()], ..image.clone() };
    assert_eq!(other.check_loadable(&here), Err(WhyNot::CpuFeatures(vec!["avx9000".into()])));
    other.runtime = "microvm".into();
    assert_eq!(other.check_loadable(&here), Err(WhyNot::OtherRuntime("microvm".into())));
    templates.remove("x").unwrap();
    assert_eq!(image.check_loadable(&here), Err(WhyNot::NoTemplate(template_hash)));
}

#[test]
fn processor_features_are_read_on_both_architectures() {
    for text in ["processor\t: 0\nflags\t\t: sse fpu\nbugs: x\n", "Features\t: sse fpu\n"] {
        assert_eq!(parse_cpu_features(text), ["fpu", "sse"]);
    }
    assert!(parse_cpu_features("").is_empty());
}
