proto: ## Regenerate the committed protobuf code
	$(PYTHON) -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $$(find proto -name '*.proto' | sort)
