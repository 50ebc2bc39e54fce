"""The Ray Serve deployments: thin adapters around `dspark_ray`; the application is `app.build_app`."""
